"""What a training changes, taken as values and given them back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.training.elastic import tree

__all__ = ["captured", "put", "unwrapped"]


def unwrapped(value: Any) -> Any:
    """The module in a DDP; anything else as it is."""
    return value.module if isinstance(value, DistributedDataParallel) else value


def captured(live: Any) -> Any:
    """Its values as a tree, which shares its tensors."""
    live = unwrapped(live)
    return live.state_dict() if _is_stateful(live) else live


def put(live: Any, values: Any) -> Any:
    """Give it values, of which it takes nothing for its own.

    Returns:
        What stands in its place: itself, where it could be changed.
    """
    inner = unwrapped(live)
    if isinstance(inner, nn.Module):
        inner.load_state_dict(values)
    elif _is_stateful(inner):
        # An optimizer would go on with these very tensors.
        inner.load_state_dict(tree.clone(values))
    elif isinstance(inner, Tensor) and _alike(inner, values):
        with torch.no_grad():
            inner.copy_(values)
    else:
        return tree.clone(values)
    return live


def _is_stateful(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _alike(live: Tensor, values: object) -> bool:
    return (
        isinstance(values, Tensor)
        and live.shape == values.shape
        and live.dtype == values.dtype
    )
