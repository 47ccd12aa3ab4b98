"""Flat buffers hold many tensors end to end, so that one message sends all of them.

Sent one by one, each small tensor costs the latency of a message. See "tensor fusion"
in Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in
TensorFlow", 2018, arXiv:1802.05799.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["FlatBuffers"]

Kind = tuple[torch.dtype, torch.device]
_ALIGNED_BYTES = 64
"""Each buffer in given memory begins at a multiple of this, a cache line."""


class _Part:
    """The tensors of one dtype and device, which share a buffer.

    Args:
        places: indices of the tensors in the list that `FlatBuffers` was made for.
        shapes: shapes of the tensors.
        buffer: one element for each element of the tensors, and one for each tensor.
    """

    def __init__(
        self, places: list[int], shapes: Sequence[torch.Size], buffer: Tensor
    ) -> None:
        self.places = places
        sizes = [shape.numel() for shape in shapes]
        self.buffer = buffer
        *pieces, self.flags = buffer.split([*sizes, len(sizes)])
        self.views = [
            piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)
        ]


class FlatBuffers:
    """One-dimensional buffers for a list of tensors, one for each dtype and device.

    A buffer ends with one flag for each of its tensors: 1 if `fill` was given a tensor,
    0 if it was given None. In a sum or a mean of buffers, the flag is 0 exactly for the
    tensors that were None on all ranks.

    Args:
        like: tensors with the shapes, dtypes and devices of those to hold.
        memory: `bytes_of(like)` bytes of host memory for the buffers, if the tensors
            are in host memory. Default: memory of their own.
    """

    def __init__(
        self, like: Sequence[Tensor], memory: memoryview | None = None
    ) -> None:
        self._shapes = [(each.shape, each.dtype, each.device) for each in like]
        self._allocate(memory)

    def _allocate(self, memory: memoryview | None = None) -> None:
        self._parts = []
        begin = 0
        for (dtype, device), places in self._places().items():
            shapes = [self._shapes[place][0] for place in places]
            count = _elements(shapes)
            if memory is None:
                buffer = torch.zeros(count, dtype=dtype, device=device)
            else:
                buffer = torch.frombuffer(
                    memory, dtype=dtype, count=count, offset=begin
                )
                begin += _aligned(count * dtype.itemsize)
            self._parts.append(_Part(places, shapes, buffer))

    def _places(self) -> dict[Kind, list[int]]:
        """For each dtype and device, the indices of its tensors."""
        kinds: dict[Kind, list[int]] = {}
        for place, (_, dtype, device) in enumerate(self._shapes):
            kinds.setdefault((dtype, device), []).append(place)
        return kinds

    @staticmethod
    def bytes_of(like: Sequence[Tensor]) -> int:
        """The bytes of memory that buffers for these tensors need."""
        shapes: dict[Kind, list[torch.Size]] = {}
        for each in like:
            shapes.setdefault((each.dtype, each.device), []).append(each.shape)
        return sum(
            _aligned(_elements(of_kind) * dtype.itemsize)
            for (dtype, _), of_kind in shapes.items()
        )

    def __getstate__(self) -> dict[str, Any]:
        # Pickling would separate the views from their buffers.
        return {"_shapes": self._shapes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._allocate()

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers, in the order in which their dtype and device first occur."""
        return [part.buffer for part in self._parts]

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors into the buffers. None is copied as zeros."""
        for part in self._parts:
            views, given, flags = [], [], []
            for place, view in zip(part.places, part.views, strict=True):
                tensor = tensors[place]
                flags.append(tensor is not None)
                if tensor is None:
                    view.zero_()
                else:
                    views.append(view)
                    given.append(_dense(tensor))
            part.flags.copy_(torch.tensor(flags, device="cpu"))
            if views:
                torch._foreach_copy_(views, given)

    def add(self, other: FlatBuffers) -> None:
        """Add other buffers to these, flags included."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.add_(theirs)

    def scale(self, factor: float) -> None:
        """Multiply all elements by a positive number. Flags above 0 stay above 0."""
        for buffer in self.buffers:
            buffer.mul_(factor)

    @torch.no_grad()
    def copy_to(self, tensors: Sequence[Tensor]) -> None:
        """Copy the buffers' content into tensors on any device."""
        for part in self._parts:
            torch._foreach_copy_([tensors[place] for place in part.places], part.views)

    @torch.no_grad()
    def set_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Set the parameters' `grad` to the buffers' content; None where the flag is 0.

        Gradients of parameters on the buffers' device are views of the buffers.
        """
        for part in self._parts:
            had = part.flags.tolist()
            for place, view, flag in zip(part.places, part.views, had, strict=True):
                parameter = parameters[place]
                parameter.grad = view.to(parameter.device) if flag else None


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _elements(shapes: Sequence[torch.Size]) -> int:
    """The elements of a buffer for tensors of these shapes, flags included."""
    return sum(shape.numel() for shape in shapes) + len(shapes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
