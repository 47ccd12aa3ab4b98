"""Signatures: the properties of a call that must be equal on all ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch

from nbdist.ipc.flight_record import call_text

__all__ = ["Signature", "signature"]

_LIMIT = 4096
"""The most signatures that are kept, because shapes may never repeat."""


@dataclass(frozen=True, eq=False)
class Signature:
    """The properties of a call that must be equal on all ranks.

    `signature` caches these objects.
    """

    operation: str
    reduce_op: str | None
    root: int | None
    dtype: str
    shape: tuple[int, ...]
    device: str
    fingerprint: int
    """A 63-bit digest of the fields above, equal in every process and never 0."""
    text: bytes
    """The fields above, as the flight recorder writes them."""


@lru_cache(_LIMIT)
def signature(
    operation: str,
    reduce_op: str | None,
    root: int | None,
    dtype: torch.dtype | None,
    shape: tuple[int, ...],
    device: str,
) -> Signature:
    """The signature of a call. `device` is the type of a device, such as "cpu"."""
    name = "object" if dtype is None else str(dtype).removeprefix("torch.")
    parts = (operation, reduce_op, root, name, tuple(shape), device)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return Signature(
        *parts,
        fingerprint=int.from_bytes(digest, "little") >> 1 or 1,
        text=call_text(operation, reduce_op, root, name, device, shape),
    )
