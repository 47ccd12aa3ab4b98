"""Batches as nested containers of tensors, as collate functions make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["emptied", "moved", "tensors_in"]


def moved(batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The batch with `to(*args, **kwargs)` called on whatever has it.

    That is tensors, but also objects that know better which of their tensors belong on
    a device, such as a PackedSequence. Containers come back as their own kind.
    """
    if hasattr(batch, "to"):
        return batch.to(*args, **kwargs)
    return _map_children(lambda child: moved(child, *args, **kwargs), batch)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Every tensor in the batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from tensors_in(list(batch.values()))
    elif isinstance(batch, (list, tuple)):
        for child in batch:
            yield from tensors_in(child)


def emptied(batch: Any) -> Any:
    """The batch with no sample in it: tensors and arrays of no rows, empty lists.

    What has no rows to take away, such as a number, stays as it is.
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, (list, tuple)) and not any(map(_is_container, batch)):
        return batch[:0]
    return _map_children(emptied, batch)


def _is_container(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray, Mapping, list, tuple))


def _map_children(function: Callable[[Any], Any], batch: Any) -> Any:
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
    except TypeError:  # one that is made otherwise, such as a defaultdict
        return children
