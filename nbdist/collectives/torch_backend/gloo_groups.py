"""The user's groups of torch's backend "gloo", which nbdist neither runs nor releases.

torch cannot end what is under way on such a group. If a failed cell has left ranks with
different calls on it, the group gets another connection in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from nbdist.collectives.mailbox import Traffic
from nbdist.collectives.torch_backend.dispatcher import OPERATORS
from nbdist.collectives.torch_backend.process_group import ProcessGroup
from nbdist.errors import CollectiveAborted
from nbdist.wire import Tally

__all__ = ["count_messages", "gloo_tallies", "refuse_gloo", "renew_gloo"]

_Type = dist.ProcessGroup.BackendType
_KEYS = [
    getattr(_Type, name)
    for name in ("CUSTOM", "XCCL", "UCC", "MPI")
    if hasattr(_Type, name)
]
"""The keys of the connections that replace a group's first one. A group keeps the
connection that it got first for a key."""
_CONNECT_WITHIN = timedelta(seconds=8)
_messages: WeakKeyDictionary[dist.ProcessGroup, Traffic] = WeakKeyDictionary()
_abandoned: list[Any] = []
"""Connections with calls under way. torch's destructor would wait for these calls, for
the time-out of the group, in the line of the user's that drops it."""
_spent: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""Why a group could not be connected again."""
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


def renew_gloo(keys: Collection[str]) -> dict[str, str]:
    """Connect the groups of these names again. All their members must call.

    What is under way on the old connection stays there, and meets no later call.

    Returns:
        Why a group could not be connected, by its name.
    """
    failed = {}
    for key, group, _, backend in sorted(_groups(), key=lambda each: each[0]):
        if key in keys:
            _abandoned.append(backend)
            try:
                _connect(group, backend)
            except RuntimeError as error:
                failed[key] = str(error)
    return failed


def _connect(group: dist.ProcessGroup, backend: Any) -> None:
    number = _renewals.get(group, 0)
    if number == len(_KEYS):
        raise RuntimeError(
            f"torch cannot connect it again after {number} times in which failed cells "
            "have left calls in flight"
        )
    _, store = distributed_c10d._world.pg_map[group]
    options = getattr(backend, "options", None)
    timeout = options._timeout if options else distributed_c10d.default_pg_timeout
    store = PrefixStore(f"renewal/{number}", store)
    made: Any = dist.ProcessGroupGloo
    # The notebook ends ranks that do not renew their groups within 20 s.
    fresh = made(store, group.rank(), group.size(), timeout=_CONNECT_WITHIN)
    fresh._set_default_timeout(timeout)
    for device in group._device_types:
        if group._get_backend(device).name() == "gloo":
            group._register_backend(device, _KEYS[number], fresh)
    _renewals[group] = number + 1
    _messages.pop(group, None)


def refuse_gloo(failed: Mapping[str, str]) -> None:
    """Have the operations of these groups raise. Their members must call.

    Args:
        failed: Why, by the group's name before `renew_gloo`.
    """
    names = {key.split()[1].partition("/")[0]: why for key, why in failed.items()}
    for key, group, _, _ in list(_groups()):
        name = key.split()[1].partition("/")[0]
        if name in names:
            _refuse(group, names[name])


def _refuse(group: dist.ProcessGroup, why: str) -> None:
    """Have the group's operations raise."""
    if not _spent:
        made: Any = dist.ProcessGroup
        for name in OPERATORS:
            if hasattr(made, name):
                setattr(made, name, _refusing(getattr(made, name)))
    _spent[group] = why


def _refusing(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def refusing(self: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        why = _spent.get(self)
        if why is not None:
            raise CollectiveAborted(
                f"this group of gloo is broken, because {why}: make a new group on all "
                "its ranks"
            )
        return operation(self, *args, **named)

    return refusing
