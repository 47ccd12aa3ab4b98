"""Copies batches to the device, one batch ahead of the training.

A batch is a tensor, or nested containers of tensors, as collate functions return them.
torch.utils._pytree is not used here, because it does not enter a Mapping of an unknown
class, such as the BatchEncoding of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

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
    try:
        for batch in batches:
            copied = _begin_copy(batch, device, side)
            if waiting is not None:
                yield _received(*waiting, device)
            waiting = copied
        if waiting is not None:
            yield _received(*waiting, device)
    finally:
        # The next user of the stream may take over the memory of the last batches.
        side.wait_stream(torch.cuda.current_stream(device))


def _begin_copy(
    batch: Any, device: torch.device, side: torch.cuda.Stream
) -> tuple[Any, torch.cuda.Event]:
    # The consumer drops a batch when the steps that read it are queued. Its memory,
    # which belongs to the side stream, may then be given to a later batch, whose copy
    # must not begin before these steps have ended. `record_stream` cannot serve: the
    # tensors of a batch that is an object of an unknown class are not known.
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        return _moved(batch, device, non_blocking=True), side.record_event()


def _received(batch: Any, ready: torch.cuda.Event, device: torch.device) -> Any:
    """Make a copied batch ready for use on the current stream."""
    torch.cuda.current_stream(device).wait_event(ready)
    return batch


def _moved(batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `to(*args, **kwargs)` on all objects in the batch that have this method.

    Tensors have it. So do objects that choose which of their tensors to move, such as
    a PackedSequence.
    """
    if hasattr(batch, "to"):
        return batch.to(*args, **kwargs)
    return map_children(lambda child: _moved(child, *args, **kwargs), batch)


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
