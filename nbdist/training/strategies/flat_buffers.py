"""Tensors laid end to end in one buffer for each dtype, so that one message takes all.

Sending many small tensors one by one costs a latency each; see "tensor fusion" in
Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
2018, arXiv:1802.05799.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pack"]


class _Part:
    """The tensors of one dtype and device: their places in a list, and a buffer."""

    def __init__(
        self,
        places: list[int],
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.places = places
        sizes = [shape.numel() for shape in shapes]
        self.buffer = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=device)
        *pieces, self.flags = self.buffer.split([*sizes, len(sizes)])
        self.views = [
            piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)
        ]


class Pack:
    """Room for tensors shaped as some others, as a few one-dimensional buffers.

    Behind the tensors of a buffer stands one element for each of them: 1 where `fill`
    had a tensor, 0 where it had None. So a sum or a mean of buffers also says which
    tensors nobody had.

    Args:
        like: tensors whose shapes, dtypes and devices the room has.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._shapes = [(each.shape, each.dtype, each.device) for each in like]
        self._make_room()

    def _make_room(self) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, (_, dtype, device) in enumerate(self._shapes):
            kinds.setdefault((dtype, device), []).append(place)
        self._parts = [
            _Part(places, [self._shapes[place][0] for place in places], *kind)
            for kind, places in kinds.items()
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Tensors that share memory would come back as tensors that do not.
        return {"_shapes": self._shapes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_room()

    @property
    def buffers(self) -> list[Tensor]:
        """One for each dtype and device, in the order in which they first came."""
        return [part.buffer for part in self._parts]

    @torch.no_grad()
    def fill(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors in; where there is None, zeros."""
        for part in self._parts:
            part.buffer.zero_()
            views, given = [], []
            for row, (place, view) in enumerate(
                zip(part.places, part.views, strict=True)
            ):
                tensor = tensors[place]
                if tensor is not None:
                    part.flags[row] = 1
                    views.append(view)
                    given.append(_dense(tensor))
            if views:
                torch._foreach_copy_(views, given)

    def add(self, other: Pack) -> None:
        """Add another room's buffers, flags included, to this one's."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.add_(theirs)

    def scale(self, factor: float) -> None:
        """Multiply all by a number; a flag stays above 0."""
        for buffer in self.buffers:
            buffer.mul_(factor)

    @torch.no_grad()
    def spill(self, tensors: Sequence[Tensor]) -> None:
        """Copy what the room holds over other tensors, whatever their device."""
        for part in self._parts:
            torch._foreach_copy_([tensors[place] for place in part.places], part.views)

    @torch.no_grad()
    def spill_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Make the parameters' `grad` what the room holds, None where nobody had one.

        The gradients of parameters on the buffers' device alias the buffers.
        """
        for part in self._parts:
            had = part.flags.tolist()
            for place, view, flag in zip(part.places, part.views, had, strict=True):
                parameter = parameters[place]
                parameter.grad = view.to(parameter.device) if flag else None


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
