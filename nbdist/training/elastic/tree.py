"""Trees: nested dicts, lists and tuples that hold tensors and other values.

Trees are copied without pickling. `split` separates the tensors from a tree, so that
they can be sent or stored without a copy.

torch.utils._pytree is not used here, because it treats a subclass of dict as one value,
and loses what a dict has beside its entries, as the `_metadata` of a state_dict.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Slot",
    "clone",
    "copy_into",
    "in_classes_of",
    "readable",
    "split",
    "unite",
]

Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Slot:
    """A placeholder for a tensor in a tree that was split."""

    number: int
    """Index in the list of tensors."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """The type of the device, such as "cpu" or "cuda"."""


_CONSTANT = (int, float, complex, bool, str, bytes, type(None), torch.dtype, Slot)


def copy_into(spare: Any, value: Any) -> Any:
    """Copy a tree.

    Args:
        spare: an earlier copy, which is overwritten. Its tensors are used again where
            shape, dtype and device agree, so that a second copy allocates nothing.
        value: dicts, lists and tuples of tensors and of values that can be deep-copied.
            Tensors on a GPU are copied on the current stream.

    Returns:
        A copy that shares nothing with `value`.
    """
    pairs: Pairs = []
    copied = _copy(spare, value, pairs)
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
    return copied


def clone(value: Any) -> Any:
    """Copy a tree to new memory."""
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
        copied = {key: _copy(entries.get(key), v, pairs) for key, v in value.items()}
        return _like(value, copied)
    if type(value) in (list, tuple):
        alike = isinstance(spare, type(value)) and len(spare) == len(value)
        items = spare if alike else [None] * len(value)
        zipped = zip(items, value, strict=True)
        return type(value)([_copy(item, v, pairs) for item, v in zipped])
    return copy.deepcopy(value)


def _like(value: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the class of `value`, and with its attributes, that has new entries."""
    if type(value) is dict:
        return entries
    twin = copy.copy(value)
    for key, entry in entries.items():
        twin[key] = entry
    if hasattr(value, "__dict__"):
        vars(twin).update(copy.deepcopy(vars(value)))
    return twin


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
    """Separate a tree's tensors.

    A defaultdict whose function cannot be pickled becomes a plain dict.

    Returns:
        The tree with slots in place of its tensors, and the tensors.
    """
    tensors: list[Tensor] = []

    def replace(leaf: Any) -> Any:
        if not _is_plain(leaf):
            return leaf
        tensors.append(leaf)
        shape = tuple(leaf.shape)
        return Slot(len(tensors) - 1, shape, leaf.dtype, leaf.device.type)

    return _map_leaves(replace, value, _sendable_like), tensors


def unite(skeleton: Any, tensors: list[Tensor]) -> Any:
    """Put tensors in place of the slots of a tree that was split."""
    return _map_leaves(
        lambda leaf: tensors[leaf.number] if isinstance(leaf, Slot) else leaf, skeleton
    )


def readable(value: Any) -> Any:
    """A tree with plain dicts where `torch.load(weights_only=True)` reads no others."""
    return _map_leaves(lambda leaf: leaf, value, _readable_like)


def in_classes_of(live: Any, value: Any) -> Any:
    """Give the plain dicts of a tree the classes that they have in another one.

    Args:
        live: The values in use.
        value: What `readable` or `split` has returned of such values.
    """
    if type(value) is dict and isinstance(live, dict):
        entries = {key: in_classes_of(live.get(key), v) for key, v in value.items()}
        if type(live) is dict:
            return entries
        twin = copy.copy(live)
        twin.clear()
        twin.update(entries)
        return twin
    return value


_READABLE = (dict, OrderedDict, Counter)


def _readable_like(value: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    return _like(value, entries) if type(value) in _READABLE else entries


def _sendable_like(value: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    if type(value) is defaultdict:
        try:
            pickle.dumps(value.default_factory)
        except (pickle.PicklingError, AttributeError):  # a lambda of a cell
            return entries
    return _like(value, entries)


def _map_leaves(
    function: Callable[[Any], Any],
    value: Any,
    like: Callable[[dict[Any, Any], dict[Any, Any]], dict[Any, Any]] = _like,
) -> Any:
    if isinstance(value, dict):
        entries = {k: _map_leaves(function, each, like) for k, each in value.items()}
        return like(value, entries)
    if type(value) in (list, tuple):
        return type(value)([_map_leaves(function, each, like) for each in value])
    return function(value)
