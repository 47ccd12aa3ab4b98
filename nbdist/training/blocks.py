"""Reads tensors and arrays block by block, so that a large one needs no copy.

What is read may be any variable of the user's. Memory that may fault, and all memory
that the main thread may free meanwhile, is copied to a block first: see
`nbdist.ipc.own_memory`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nbdist.ipc import own_memory
from nbdist.ipc.own_memory import Unreadable
from nbdist.training.device import context_error

__all__ = ["Strided", "octet_blocks", "strided"]

BLOCK_BYTES = 1 << 20
DIRECT_BLOCK_BYTES = 4 << 20
"""The same of memory that is not copied."""
LEAST_COPIED_BYTES = 2048
"""Less memory of torch's or numpy's own is read as it is. The allocator keeps it mapped
when another thread frees it."""

Octets = np.ndarray[Any, np.dtype[np.uint8]]
Box = tuple[int, tuple[int, ...]]
"""A part of strided elements: the offset of the first one, and the shape."""


class Strided(NamedTuple):
    """Where the elements of a tensor or array in host memory lie."""

    address: int
    width: int
    """The bytes of an element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    is_copied: bool
    """Whether the memory may fault, so that each block is copied before it is read."""

    @property
    def size(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.width

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie one after another, in the order of their indices."""
        size = self.width
        for length, stride in zip(
            reversed(self.shape), reversed(self.strides), strict=True
        ):
            if length != 1 and stride != size:
                return False
            size *= length
        return True

    def distinct(self) -> tuple[Strided, int]:
        """Each element once, in the order of addresses, and how often it occurs."""
        pairs = sorted(
            ((s, n) for s, n in zip(self.strides, self.shape, strict=True) if s),
            reverse=True,
        )
        shape, strides = tuple(n for _, n in pairs), tuple(s for s, _ in pairs)
        once = self._replace(shape=shape, strides=strides)
        return once, self.size // once.size if once.size else 1


def strided(content: Tensor | np.ndarray[Any, Any]) -> Strided:
    """Where a tensor's or array's elements lie. They are not read.

    Raises:
        Unreadable: It cannot be read.
    """
    is_aside = threading.current_thread() is not threading.main_thread()
    if isinstance(content, np.ndarray):
        is_foreign = own_memory.check_array(content)
        is_copied = is_foreign or (is_aside and content.nbytes > LEAST_COPIED_BYTES)
        address, strides = content.ctypes.data, content.strides
        return Strided(address, content.itemsize, content.shape, strides, is_copied)
    address, span, is_foreign = own_memory.check_tensor(content)
    is_copied = is_foreign or (is_aside and span > LEAST_COPIED_BYTES)
    width = content.element_size()
    strides = tuple(width * each for each in content.stride())
    return Strided(address, width, tuple(content.shape), strides, is_copied)


def octet_blocks(where: Strided, most_bytes: int | None = None) -> Iterator[Octets]:
    """The bytes of all elements, in the order of their indices, in blocks.

    A block is valid until the next one.

    Args:
        where: The elements.
        most_bytes: Skip blocks evenly, so that about as many bytes are read. None reads
            all.

    Raises:
        Unreadable: A part cannot be read.
    """
    if not where.size:
        return
    room: Octets
    step = 1 if most_bytes is None else -(-where.size // most_bytes)
    if where.is_dense and where.is_copied and step == 1:
        room = np.empty(min(where.size, BLOCK_BYTES), np.uint8)
        target = room.ctypes.data
        for begin in range(0, where.size, BLOCK_BYTES):
            size = min(where.size - begin, BLOCK_BYTES)
            own_memory.copy(where.address + begin, size, target)
            yield room[:size]
        return
    boxes = itertools.islice(boxes_of(where), 0, None, step)
    if not where.is_copied:
        for offset, shape in boxes:
            yield _viewed(where.address + offset, where, shape)
        return
    room = np.empty(BLOCK_BYTES + where.width, np.uint8)
    for offset, shape in boxes:
        below = _below(shape, where.strides)
        span = _span(shape, where.strides, where.width)
        own_memory.copy(where.address + offset - below, span, room.ctypes.data)
        yield _viewed(room.ctypes.data + below, where, shape)


def boxes_of(where: Strided) -> Iterator[Box]:
    """Divide strided elements into parts that fit into a block, in their order."""
    limit = BLOCK_BYTES if where.is_copied else DIRECT_BLOCK_BYTES
    yield from _divided(0, where.shape, where, max(limit, where.width))


def _divided(
    offset: int, shape: tuple[int, ...], where: Strided, limit: int
) -> Iterator[Box]:
    def fits(part: tuple[int, ...]) -> bool:
        span = _span(part, where.strides, where.width) if where.is_copied else 0
        return max(span, math.prod(part) * where.width) <= limit

    if fits(shape):
        yield offset, shape
        return
    axis = next(i for i, length in enumerate(shape) if length > 1)
    inner = (*shape[:axis], 1, *shape[axis + 1 :])
    length, stride = shape[axis], where.strides[axis]
    count = 1
    if fits(inner):
        count = limit // (math.prod(inner) * where.width)
        if where.is_copied and stride:
            room = limit - _span(inner, where.strides, where.width)
            count = min(count, room // abs(stride) + 1)
    for begin in range(0, length, count):
        part = (*shape[:axis], min(count, length - begin), *shape[axis + 1 :])
        yield from _divided(offset + begin * stride, part, where, limit)


def _span(shape: Sequence[int], strides: Sequence[int], width: int) -> int:
    """The bytes from the first to the last one."""
    return width + sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))


def _below(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The bytes that lie before the first element, where strides are negative."""
    return -sum((n - 1) * min(s, 0) for n, s in zip(shape, strides, strict=True))


def _viewed(address: int, where: Strided, shape: tuple[int, ...]) -> Octets:
    """The elements of a part as bytes: a view if they are contiguous, else a copy."""
    below = _below(shape, where.strides)
    size = _span(shape, where.strides, where.width)
    # `Tensor.numpy()` would forbid the storage to be resized later, as FSDP does.
    memory: Any = (ctypes.c_ubyte * size).from_address(address - below)
    kind = np.dtype((np.void, where.width))
    items: Any = np.ndarray(shape, kind, memory, below, where.strides)
    return np.ascontiguousarray(items).reshape(-1).view(np.uint8)


def check_device(device: torch.device) -> None:
    """Check before tensors of an accelerator are read.

    Raises:
        Unreadable: The CUDA context has failed. A call would raise its error again.
    """
    if device.type == "cuda" and (failed := context_error()) is not None:
        raise Unreadable(f"the CUDA context has failed ({failed})")
