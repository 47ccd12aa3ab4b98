"""Batches on their way to the device, one ahead of the step that takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nbdist.training.data.structure import moved, tensors_in

__all__ = ["on_device"]


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches, their tensors on a device.

    To a GPU each is copied on a side stream while the step before it runs; the copy
    does not wait for the GPU where the batch lies in pinned memory. The consumer's
    stream waits for its batch, and the host does not.
    """
    if device.type == "cuda":
        return _ahead(batches, device)
    return (moved(batch, device) for batch in batches)


def _ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    side = torch.cuda.Stream(device)
    waiting: tuple[Any, torch.cuda.Event] | None = None
    for batch in batches:
        copied = _begin_copy(batch, device, side)
        if waiting is not None:
            yield _taken(*waiting, device)
        waiting = copied
    if waiting is not None:
        yield _taken(*waiting, device)


def _begin_copy(
    batch: Any, device: torch.device, side: torch.cuda.Stream
) -> tuple[Any, torch.cuda.Event]:
    with torch.cuda.stream(side):
        return moved(batch, device, non_blocking=True), side.record_event()


def _taken(batch: Any, ready: torch.cuda.Event, device: torch.device) -> Any:
    """The batch, for use on the current stream."""
    current = torch.cuda.current_stream(device)
    current.wait_event(ready)
    for tensor in tensors_in(batch):
        if tensor.is_cuda:
            # Its memory is the side stream's: not to be reused before the step is done.
            tensor.record_stream(current)
    return batch
