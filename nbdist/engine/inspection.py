"""A rank's variables, each described by a few plain values."""

from __future__ import annotations

import fnmatch
import hashlib
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nbdist.engine.rank import this_rank
from nbdist.errors import encodable

__all__ = ["Variable", "variables"]

TEXT_LIMIT = 60
DIGEST_ALL_BYTES = 16 << 20
"""Up to this size, the digest covers all bytes; beyond it, a sample of them."""
UNINTERESTING = (types.ModuleType, types.FunctionType, type)


@dataclass(frozen=True)
class Variable:
    """One name of a rank's namespace."""

    name: str
    kind: str
    shape: tuple[int, ...] | None
    dtype: str
    device: str
    value: str
    """A short text, or the Euclidean norm of a tensor or array."""
    digest: str
    """Equal on two ranks if the values are equal."""


def variables(pattern: str = "*") -> list[Variable]:
    """The user's variables whose names match a shell pattern, by name.

    The caller is another thread than the main one, which may be changing the values: a
    tensor may be read in the middle of an update.
    """
    shell = this_rank().shell
    namespace = dict(shell.user_ns)
    return [
        _describe_any(name, value)
        for name, value in sorted(namespace.items())
        if not name.startswith("_")
        and name not in shell.user_ns_hidden
        and fnmatch.fnmatchcase(name, pattern)
        and not isinstance(value, UNINTERESTING)
    ]


def _describe_any(name: str, value: Any) -> Variable:
    try:
        return _describe(name, value)
    except Exception as error:  # noqa: BLE001 - one odd object must not hide the others
        text = f"<cannot be described: {type(error).__name__}>"
        return Variable(name, type(value).__name__, None, "", "", text, text)


def _describe(name: str, value: Any) -> Variable:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        return Variable(
            name,
            kind,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            str(tensor.device),
            _norm_of_tensor(tensor),
            _digest_of_tensor(tensor),
        )
    if isinstance(value, np.ndarray):
        text = _norm_of_array(value)
        digest = (
            _digest_of_bytes(np.ascontiguousarray(value))
            if not value.dtype.hasobject
            else text
        )
        return Variable(name, kind, value.shape, str(value.dtype), "", text, digest)
    text = _text(value)
    digest = hashlib.sha1(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Variable(name, kind, None, "", "", _shorten(text), digest)


def _text(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        parameters = sum(p.numel() for p in value.parameters())
        return f"{type(value).__name__}, {parameters:,} parameters"
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may do anything
        return f"<repr failed: {type(error).__name__}>"
    # The address of an object differs between ranks and says nothing of its value.
    return object.__repr__(value).split(" at 0x")[0] + ">" if " at 0x" in text else text


def _shorten(text: str) -> str:
    text = encodable(" ".join(text.split()))
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"


def _norm_of_tensor(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return ""
    if tensor.numel() == 1:
        return (
            f"{tensor.item():.6g}" if tensor.dtype != torch.bool else str(tensor.item())
        )
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch has no arithmetic for 8-bit floats
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return (
        f"norm {torch.linalg.vector_norm(tensor.reshape(-1), dtype=wide).item():.6g}"
        if tensor.is_floating_point() or tensor.is_complex()
        else f"norm {torch.linalg.vector_norm(tensor.reshape(-1).to(wide)).item():.6g}"
    )


def _digest_of_tensor(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        return str(tensor.shape)
    sample = tensor.reshape(-1)
    if sample.numel() * sample.element_size() > DIGEST_ALL_BYTES:
        sample = sample[
            :: sample.numel() * sample.element_size() // DIGEST_ALL_BYTES + 1
        ]
    plain = sample.resolve_conj().resolve_neg().cpu().contiguous()
    # A tensor of one element is contiguous with any stride.
    octets = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    return _digest_of_bytes(octets.numpy())


def _norm_of_array(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind not in "biufc":
        return ""
    if array.size == 1:
        return f"{array.item():.6g}" if array.dtype.kind in "iuf" else str(array.item())
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    return f"norm {np.linalg.norm(array.ravel().astype(wide)):.6g}"


def _digest_of_bytes(array: np.ndarray[Any, Any]) -> str:
    return hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
