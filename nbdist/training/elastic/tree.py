"""Nested values with tensors in them: copied without pickling, sent without copying."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Slot", "clone", "copy_into", "split", "unite"]

Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor while the tree around it travels."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """The kind, such as "cpu" or "cuda"."""


_CONSTANT = (int, float, complex, bool, str, bytes, type(None), torch.dtype, Slot)


def copy_into(spare: Any, value: Any) -> Any:
    """A copy of `value` that shares nothing with it.

    Args:
        spare: an earlier copy that nobody needs any more. Its tensors take the new
            values where shape, dtype and device agree, so that a second copy allocates
            nothing.
        value: dicts, lists and tuples of tensors and of anything that can be
            deep-copied. On a GPU the copy is queued on the current stream.
    """
    pairs: Pairs = []
    copied = _copy(spare, value, pairs)
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
    return copied


def clone(value: Any) -> Any:
    """A copy that shares nothing with the value."""
    return copy_into(None, value)


def _copy(spare: Any, value: Any, pairs: Pairs) -> Any:
    if _is_plain(value):
        if not _fits(spare, value):
            return value.detach().clone()
        pairs.append((spare, value.detach()))
        return spare
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, dict):
        entries = spare if isinstance(spare, dict) else {}
        return {key: _copy(entries.get(key), v, pairs) for key, v in value.items()}
    if type(value) in (list, tuple):
        alike = isinstance(spare, type(value)) and len(spare) == len(value)
        items = spare if alike else [None] * len(value)
        zipped = zip(items, value, strict=True)
        return type(value)([_copy(item, v, pairs) for item, v in zipped])
    return copy.deepcopy(value)


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def _fits(spare: object, value: Tensor) -> bool:
    return (
        isinstance(spare, Tensor)
        and spare.shape == value.shape
        and spare.dtype == value.dtype
        and spare.device == value.device
    )


def split(value: Any) -> tuple[Any, list[Tensor]]:
    """The tree with slots in place of its tensors, and the tensors."""
    tensors: list[Tensor] = []
    return _split(value, tensors), tensors


def _split(value: Any, tensors: list[Tensor]) -> Any:
    if _is_plain(value):
        tensors.append(value)
        shape = tuple(value.shape)
        return Slot(len(tensors) - 1, shape, value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _split(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_split(each, tensors) for each in value])
    return value


def unite(skeleton: Any, tensors: list[Tensor]) -> Any:
    """The tree that `split` took apart."""
    if isinstance(skeleton, Slot):
        return tensors[skeleton.number]
    if isinstance(skeleton, dict):
        return {key: unite(each, tensors) for key, each in skeleton.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)([unite(each, tensors) for each in skeleton])
    return skeleton
