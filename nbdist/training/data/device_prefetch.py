"""Copies batches to the device, one batch ahead of the training.

A batch is a tensor, or nested containers of tensors, as collate functions return them.
torch.utils._pytree is not used here, because it does not enter a Mapping of an unknown
class, such as the BatchEncoding of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["map_children", "on_device"]


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches with their tensors on a device.

    To a GPU, a batch is copied on a side stream while the previous step runs. If the
    batch is in pinned memory, the host does not wait for the copy. The consumer's
    current stream waits for the copy of its batch.
    """
    if device.type == "cuda":
        return _ahead(batches, device)
    return (_moved(batch, device) for batch in batches)


def _ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    side = torch.cuda.Stream(device)
    waiting: tuple[Any, torch.cuda.Event] | None = None
    for batch in batches:
        copied = _begin_copy(batch, device, side)
        if waiting is not None:
            yield _received(*waiting, device)
        waiting = copied
    if waiting is not None:
        yield _received(*waiting, device)


def _begin_copy(
    batch: Any, device: torch.device, side: torch.cuda.Stream
) -> tuple[Any, torch.cuda.Event]:
    with torch.cuda.stream(side):
        return _moved(batch, device, non_blocking=True), side.record_event()


def _received(batch: Any, ready: torch.cuda.Event, device: torch.device) -> Any:
    """Make a copied batch ready for use on the current stream."""
    current = torch.cuda.current_stream(device)
    current.wait_event(ready)
    for tensor in _tensors_in(batch):
        if tensor.is_cuda:
            # The side stream must not reuse the memory before the step has ended.
            tensor.record_stream(current)
    return batch


def _moved(batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `to(*args, **kwargs)` on all objects in the batch that have this method.

    Tensors have it. So do objects that choose which of their tensors to move, such as
    a PackedSequence.
    """
    if hasattr(batch, "to"):
        return batch.to(*args, **kwargs)
    return map_children(lambda child: _moved(child, *args, **kwargs), batch)


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors in the batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors_in(list(batch.values()))
    elif isinstance(batch, (list, tuple)):
        for child in batch:
            yield from _tensors_in(child)


def map_children(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to the children of a container, whose type is kept.

    A batch that is not a container is returned unchanged.
    """
    if isinstance(batch, Mapping):
        return _like(batch, {key: function(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(function, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(function, batch))
    return batch


def _like(mapping: Mapping[Any, Any], children: dict[Any, Any]) -> Any:
    try:
        return type(mapping)(children)  # type: ignore[call-arg]
    except TypeError:  # its constructor differs, such as a defaultdict's
        return children
