"""The user's groups of torch's backend "gloo", which nbdist neither runs nor releases.

torch cannot end what is under way on such a group. If a failed cell has left ranks with
different calls on it, the group gets another connection in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from nbdist.collectives.mailbox import Traffic
from nbdist.collectives.torch_backend.dispatcher import OPERATORS
from nbdist.collectives.torch_backend.process_group import ProcessGroup
from nbdist.errors import CollectiveAborted
from nbdist.wire import Tally

__all__ = ["count_messages", "gloo_tallies", "renew_gloo"]

_Type = dist.ProcessGroup.BackendType
_KEYS = [
    getattr(_Type, name)
    for name in ("CUSTOM", "XCCL", "UCC", "MPI")
    if hasattr(_Type, name)
]
"""The keys of the connections that replace a group's first one. A group keeps the
connection that it got first for a key."""
_messages: WeakKeyDictionary[dist.ProcessGroup, Traffic] = WeakKeyDictionary()
_spent: WeakSet[dist.ProcessGroup] = WeakSet()
"""The groups that cannot be connected again."""
_renewals: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def count_messages() -> None:
    """Count the messages of torch's own groups, whose C++ does not. Safe to call twice.

    `ProcessGroup` has methods of its own, which count already.
    """
    made: Any = dist.ProcessGroup
    for name in ("send", "recv", "recv_anysource"):
        if not hasattr(getattr(made, name), "__wrapped__"):
            setattr(made, name, _counted(name, getattr(made, name)))


def _counted(name: str, start: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    @functools.wraps(start)
    def counted(
        self: dist.ProcessGroup, tensors: Any, *place: Any, **named: Any
    ) -> dist.Work:
        work = start(self, tensors, *place, **named)
        place = (*place, *named.values())
        traffic = _messages.setdefault(self, Traffic())
        if name == "send":
            traffic.send(*place)
        elif name == "recv":
            traffic.receive(*place)
        else:
            traffic.receive_from_any(_AnySource(work), *place)
        return work

    return counted


class _AnySource:
    """A message from any rank, as `Traffic` needs it."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return self._work.is_completed()

    @property
    def source(self) -> int | None:
        return self._work._source_rank() if self._work.is_completed() else None


def _groups() -> Iterator[tuple[str, dist.ProcessGroup, torch.device, Any]]:
    """Each group's name, and a device whose tensors gloo takes, with its backend."""
    for group, name in list(distributed_c10d._world.pg_names.items()):
        if type(group) is ProcessGroup:
            continue
        for device in group._device_types:
            backend: Any = group._get_backend(device)
            if backend.name() == "gloo":
                # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
                backend = getattr(backend, "wrapped_pg", backend)
                yield f"gloo {name}/{_renewals.get(group, 0)}", group, device, backend
                break


def gloo_tallies(
    known: Mapping[str, object],
) -> tuple[dict[str, object], dict[str, Tally]]:
    """As `nbdist.collectives.tallies`, of gloo's groups."""
    marks: dict[str, object] = {}
    changed = {}
    for key, group, _, backend in _groups():
        traffic = _messages.get(group)
        sent = tuple(traffic.sent.items()) if traffic else ()
        from_any = traffic.from_any() if traffic else 0
        received = tuple(traffic.received.items()) if traffic else ()
        calls = backend._get_sequence_number_for_group()
        marks[key] = mark = calls, sent, received, from_any
        if known.get(key, (0, (), (), 0)) != mark:
            ranks = dist.get_process_group_ranks(group)
            to, by = (
                [(ranks[peer], number) for peer, number in each]
                for each in (sent, received)
            )
            changed[key] = Tally(ranks, calls, to, by, from_any)
    return marks, changed


def renew_gloo(keys: Collection[str]) -> None:
    """Connect the groups of these names again. All their members must call.

    What is under way on the old connection stays there, and meets no later call. A
    group that was connected again too often refuses every later call.
    """
    for key, group, _, backend in sorted(_groups(), key=lambda each: each[0]):
        if key not in keys:
            continue
        number = _renewals.get(group, 0)
        if number == len(_KEYS):
            _refuse(group)
            continue
        _, store = distributed_c10d._world.pg_map[group]
        options = getattr(backend, "options", None)
        timeout = options._timeout if options else distributed_c10d.default_pg_timeout
        store = PrefixStore(f"renewal/{number}", store)
        made: Any = dist.ProcessGroupGloo
        fresh = made(store, group.rank(), group.size(), timeout=timeout)
        for device in group._device_types:
            if group._get_backend(device).name() == "gloo":
                group._register_backend(device, _KEYS[number], fresh)
        _renewals[group] = number + 1
        _messages.pop(group, None)


def _refuse(group: dist.ProcessGroup) -> None:
    """Have the group's operations raise."""
    if not _spent:
        made: Any = dist.ProcessGroup
        for name in OPERATORS:
            if hasattr(made, name):
                setattr(made, name, _refusing(getattr(made, name)))
    _spent.add(group)


def _refusing(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def refusing(self: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        if self in _spent:
            raise CollectiveAborted(
                "failed cells have left calls in flight on this group of gloo "
                f"{len(_KEYS) + 1} times, and torch cannot connect it again: make a "
                "new group on all its ranks"
            )
        return operation(self, *args, **named)

    return refusing
