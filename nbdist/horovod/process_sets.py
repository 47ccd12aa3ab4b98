"""Process sets: sets of ranks that have their own collectives."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from nbdist.collectives import Group, all_gather_object, default_group
from nbdist.errors import CollectiveAborted, UsageError
from nbdist.horovod.coordinator import Coordinator
from nbdist.training import lasting

__all__ = [
    "ProcessSet",
    "add_process_set",
    "begin",
    "coordinator_of",
    "end",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "is_begun",
    "members",
    "remove_process_set",
]


class ProcessSet:
    """A set of ranks that have their own collectives.

    `add_process_set` makes it usable.

    Args:
        ranks_or_comm: World ranks, or an mpi4py communicator over them.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any = ()) -> None:
        self.process_set_id: int | None = None
        """None until the set is added."""
        self._comm = None if isinstance(ranks_or_comm, Sequence) else ranks_or_comm
        self._ranks = () if self._comm is not None else tuple(ranks_or_comm)

    @property
    def ranks(self) -> list[int]:
        """The world ranks of the members, in ascending order."""
        if self is global_process_set:
            return list(range(_running().members.size))
        return sorted(self._ranks)

    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def rank(self) -> int:
        """This rank's number among the members.

        Raises:
            UsageError: This rank is not a member.
        """
        own = _running().members.rank
        if own not in self.ranks:
            raise UsageError(f"rank {own} is not in the process set {self.ranks}")
        return self.ranks.index(own)

    def included(self) -> bool:
        """Whether this rank is a member."""
        return _running().members.rank in self.ranks

    def _resolve(self, world: Group) -> list[int]:
        """The members. Ranks of a communicator are translated first."""
        if self._comm is not None:
            members = self._comm.group.Translate_ranks(None, world.comm.group)
            self._ranks = tuple(members)
        return self.ranks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return self is other or (
            self.process_set_id is not None
            and self.process_set_id == other.process_set_id
        )

    def __hash__(self) -> int:
        return hash(self.process_set_id)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Running:
    """The state between `init` and `shutdown`."""

    def __init__(self, parent: Group, members: Group) -> None:
        self.parent = parent
        """The default group at `init`. A change of membership makes a new one."""
        self.members = members
        """The ranks that take part. `new` is the only method called on this group."""
        self.sets: dict[int, tuple[ProcessSet, Coordinator | None]] = {}
        self.numbers = itertools.count()
        lasting.register(self)

    def add(self, added: ProcessSet, group: Group | None) -> None:
        coordinator = None if group is None else Coordinator(_with_gpus(group))
        number = next(self.numbers)
        self.sets[number] = added, coordinator
        added.process_set_id = number

    def _begin_again(self) -> None:
        pass  # what is half done, `_agree` removes

    def _progress(self) -> tuple[Hashable, Any]:
        sets = {
            number: sorted(added._ranks)
            for number, (added, coordinator) in self.sets.items()
            if coordinator is not None or added is not global_process_set
        }
        return "", sets

    def _agree(self, everyones: Sequence[Any]) -> None:
        """Remove the sets, and the group of all ranks, that not every rank has made."""
        if self.parent is not default_group():
            return  # the next `init` makes all of them
        known = [each for each in everyones if each is not None]
        if self.members is self.parent:  # no rank is left out
            known = [each or {} for each in everyones]
        for number, (added, coordinator) in list(self.sets.items()):
            ranks = sorted(added._ranks)
            if all(each.get(number) == ranks for each in known):
                added.process_set_id = number
                continue
            if coordinator is not None:
                why = "a rank was interrupted while it made this process set"
                coordinator.group.give_up(CollectiveAborted(why))
                coordinator.close()
            if added is global_process_set:
                self.sets[number] = added, None  # the next collective makes it
            else:
                del self.sets[number]
                added.process_set_id = None
        self.numbers = itertools.count(max(self.sets, default=-1) + 1)

    def end(self) -> None:
        for added, coordinator in self.sets.values():
            added.process_set_id = None
            if coordinator is not None:
                coordinator.close()
        self.sets.clear()


global_process_set = ProcessSet()
"""All ranks."""
_now: _Running | None = None


def begin(parent: Group, ranks: Sequence[int] | None) -> None:
    """Start with these ranks of a group, or with all.

    If `ranks` are given, every rank of the group must call. The first collective
    creates the group of Horovod's calls, because a rank that joins a running world
    calls `init` alone.

    Raises:
        UsageError: This rank is not among `ranks`.
    """
    global _now
    chosen = range(parent.size) if ranks is None else ranks
    members = parent if ranks is None else parent.new(list(chosen))
    if members is None:
        raise UsageError(
            f"init(comm={list(chosen)}) leaves out rank {parent.rank}: add the rank, "
            "or call init only on these ranks"
        )
    _now = _Running(parent, members)
    _now.add(global_process_set, None)


def end() -> None:
    """Close every process set. Safe to call twice."""
    global _now
    now, _now = _now, None
    if now is not None:
        now.end()


def is_begun() -> bool:
    """Whether `begin` was called and the ranks have not changed since then."""
    return _now is not None and _now.parent is default_group()


def _running() -> _Running:
    if _now is None:
        raise UsageError("Horovod has not been initialized: use hvd.init()")
    if _now.parent is not default_group():
        raise UsageError("the ranks have changed since hvd.init(): call hvd.init()")
    return _now


def coordinator_of(process_set: ProcessSet) -> Coordinator:
    """The coordinator of a set's calls.

    Raises:
        UsageError: The set was not added, or this rank is not a member.
    """
    now, number = _running(), process_set.process_set_id
    known = None if number is None else now.sets.get(number)
    if known is None:
        raise UsageError(
            f"{process_set} is not known: call hvd.add_process_set() on every rank "
            "first"
        )
    added, coordinator = known
    if coordinator is not None:
        return coordinator
    if added is global_process_set:
        return _begin_world(now)
    raise UsageError(
        f"rank {now.members.rank} is not in the process set {process_set.ranks}: call "
        "it only on those ranks"
    )


def _begin_world(now: _Running) -> Coordinator:
    group = now.members.new(range(now.members.size))
    assert group is not None
    coordinator = Coordinator(_with_gpus(group))
    number = global_process_set.process_set_id
    assert number is not None
    now.sets[number] = global_process_set, coordinator
    return coordinator


def members() -> Group:
    """The group of the ranks at `init`. Do not make calls on it."""
    return _running().members


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set usable. Every rank must call, in the same order.

    Args:
        process_set: The set, or its ranks.

    Raises:
        UsageError: The set is empty or was added before, a rank does not exist, or
            another set has the same ranks.
    """
    added = (
        process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    )
    now = _running()
    if added.process_set_id is not None:
        raise UsageError(f"{added} was added before")
    ranks = added._resolve(now.members)
    if not ranks:
        raise UsageError("a process set needs at least one rank")
    for other, _ in now.sets.values():
        if other.ranks == ranks:
            raise UsageError(f"ranks {ranks} are a process set already: {other}")
    now.add(added, now.members.new(ranks))
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank must call, in the same order.

    Returns:
        Whether the set was removed. The set of all ranks is never removed.
    """
    number = process_set.process_set_id
    if number is None or process_set is global_process_set:
        return False
    known = _running().sets.pop(number, None)
    if known is not None and known[1] is not None:
        known[1].close()
    process_set.process_set_id = None
    return known is not None


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each process set, by the set's number."""
    return {number: added.ranks for number, (added, _) in _running().sets.items()}


def _with_gpus(group: Group) -> Group:
    """Connect the transport for GPUs, if all members have a GPU.

    Every member must take part in this, which is not possible during a call.
    """
    if all(all_gather_object(torch.cuda.is_available(), group=group)):
        group.transport(_gpu())
    return group


def _gpu() -> torch.device:
    """This rank's GPU in a notebook. Elsewhere the current device."""
    ranks = sys.modules.get("nbdist.engine.rank")
    if ranks is not None and ranks.is_rank():
        device = torch.device(ranks.this_rank().info.device)
        if device.type == "cuda":
            return device
    return torch.device("cuda", torch.cuda.current_device())
