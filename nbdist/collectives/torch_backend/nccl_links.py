"""Connects the ranks of NCCL's process groups where they can be released.

NCCL connects a group in its first collective or batch, and two ranks in their first
message. It waits in C++ for the other ranks, where nothing releases a rank. Here they
meet before that, and a thread makes a trial call, which connects them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist.collectives.registry import default_group
from nbdist.collectives.torch_backend.dispatcher import OPERATORS
from nbdist.collectives.torch_backend.rendezvous import Rendezvous
from nbdist.errors import CollectiveAborted

__all__ = [
    "Links",
    "connect",
    "connect_first",
    "links_of",
    "release_links",
]

_MESSAGES = {"send", "recv"}
_START = "_start_coalescing"
_NAMES = {_START: "a batch"}
_made: dict[str, Callable[..., Any]] = {}
"""torch's methods, by their names."""


@dataclass
class Links:
    """What a group has connected and called on this rank."""

    ranks: tuple[int, ...]
    """The world's numbers of the members."""
    name: str
    """Equal on all members, and that of no other group."""
    made: set[tuple[object, ...]] = field(default_factory=set)
    """The device and the peer of each connection; a peer of None means all members."""
    batches: set[int] = field(default_factory=set)
    """The threads that make a batch, whose messages go between all members."""
    trial: int = 0
    """NCCL's number of the trial collective; 0 if there was none."""
    has_failed: bool = False
    """Whether a connection was not made."""
    sent: dict[int, int] = field(default_factory=dict)
    """The number of messages to ranks of the world."""
    received: dict[int, int] = field(default_factory=dict)
    last: str = "a collective"
    """The name of the last call."""

    def note(self, name: str, peer: int | None) -> None:
        """Note a call, and the other rank of a message."""
        if not self.batches:
            self.last = _NAMES.get(name, name)
        if peer is not None:
            counts = self.sent if name == "send" else self.received
            rank = self.ranks[peer]
            counts[rank] = counts.get(rank, 0) + 1


_links: WeakKeyDictionary[dist.ProcessGroup, Links] = WeakKeyDictionary()


def connect_first(group: dist.ProcessGroup, ranks: Sequence[int], name: str) -> None:
    """Have the members of a group of NCCL's meet before they connect.

    Args:
        group: One of torch's own class.
        ranks: The world's numbers of the members.
        name: Equal on all members, and that of no other group.
    """
    _links[group] = Links(tuple(ranks), name)


def connect(
    group: dist.ProcessGroup, tensors: Sequence[Tensor | torch.device], name: str
) -> None:
    """Connect all members before a call that torch makes in C++. They must call.

    Args:
        group: Their group.
        tensors: The call's tensors, or their device.
        name: The name of the call.
    """
    links, device = _links.get(group), _device(tensors)
    if links is not None and device is not None:
        _connect(group, links, name, device, None)


def links_of(group: dist.ProcessGroup) -> Links | None:
    """What a group of `connect_first` has connected and called on this rank."""
    return _links.get(group)


def release_links() -> None:
    """Have torch's methods connect first. Safe to call twice."""
    if _made:
        return
    made: Any = dist.ProcessGroup
    for name in (*OPERATORS, _START):
        if hasattr(made, name):  # each release of torch has some of them
            _made[name] = getattr(made, name)
            setattr(made, name, _connecting(name, _made[name]))
    made._end_coalescing = _ending(made._end_coalescing)


def _connecting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def connecting(self: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        links = _links.get(self)
        if links is not None:
            default_group().raise_if_aborted()
            values = (*args, *named.values())
            device = _device(values)
            if device is not None:
                peer = values[1] if name in _MESSAGES else None
                is_alone = threading.get_ident() not in links.batches
                _connect(self, links, name, device, peer if is_alone else None)
                links.note(name, peer)
            if name == _START:
                links.batches.add(threading.get_ident())
        return method(self, *args, **named)

    return connecting


def _ending(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def ending(self: dist.ProcessGroup, *args: Any, **named: Any) -> Any:
        links = _links.get(self)
        if links is not None:
            links.batches.discard(threading.get_ident())
        return method(self, *args, **named)

    return ending


def _device(values: Sequence[Any]) -> torch.device | None:
    """The GPU of a call, by its arguments."""
    for value in values:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        device = value if isinstance(value, torch.device) else _attribute(value)
        if device is not None and device.type == "cuda":
            index = (
                torch.cuda.current_device() if device.index is None else device.index
            )
            return torch.device("cuda", index)
    return None


def _attribute(value: Any) -> torch.device | None:
    """The device of a tensor, or of the options of a barrier."""
    device = getattr(value, "device", None)
    return device if isinstance(device, torch.device) else None


def _connect(
    group: dist.ProcessGroup,
    links: Links,
    operation: str,
    device: torch.device,
    peer: int | None,
) -> None:
    """Connect this rank with a peer, or all members. They must call, too."""
    own, members = group.rank(), range(group.size())
    if (device, peer) in links.made or peer == own:
        return
    places = members if peer is None else sorted((own, peer))
    ranks = [links.ranks[place] for place in places]
    world, key = default_group(), (links.name, peer is None)
    meeting = Rendezvous(world, ranks, _NAMES.get(operation, operation), key)
    have_met = False
    try:
        meeting.wait(world.raise_if_aborted)
        have_met = True
        work = functools.partial(_try, group, device, peer)
        meeting.attempt(work, world.raise_if_aborted)
    except BaseException:
        links.has_failed |= have_met
        world.abort(CollectiveAborted("a connection of NCCL was interrupted"))
        raise
    links.made.add((device, peer))
    if peer is None:
        backend: Any = group._get_backend(device)
        links.trial = backend._get_sequence_number_for_group()


def _try(group: dist.ProcessGroup, device: torch.device, peer: int | None) -> None:
    """Make a call that connects. It returns when NCCL has connected and queued it."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        word = torch.zeros(1, device=device)
        if peer is None:
            work = _made["allreduce"](group, [word], dist.AllreduceOptions())
        else:
            name = "send" if group.rank() < peer else "recv"
            work = _made[name](group, [word], peer, 0)
        work.wait()
