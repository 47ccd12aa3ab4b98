"""What this rank has begun on its groups, for the notebook to compare."""

from __future__ import annotations

import sys
from typing import Any

from nbdist.collectives import settle_calls, tallies, unseen_errors
from nbdist.collectives.call_site import CallSite, where
from nbdist.collectives.flight_recorder import recent_calls
from nbdist.collectives.registry import live
from nbdist.collectives.torch_backend.gloo_groups import (
    gloo_tallies,
    refuse_gloo,
    renew_gloo,
)
from nbdist.engine.rank import this_rank
from nbdist.ipc.left_over import left_over
from nbdist.wire import Begun, Failure, Tally

__all__ = [
    "changed_tallies",
    "in_flight",
    "renew_differing_gloo",
    "unseen_error",
    "with_unseen",
]

SETTLE_S = 0.2
"""Seconds that a cell which has succeeded waits for asynchronous calls under way, so
that it can tell their errors."""

_known: dict[str, object] = {}
_known_of_gloo: dict[str, object] = {}


def changed_tallies() -> dict[str, Tally]:
    """The tallies that have changed since the last call. The main thread calls it."""
    global _known, _known_of_gloo
    for group in list(live):
        group.mailbox.traffic.test()
    _known, changed = tallies(_known)
    _known_of_gloo, of_gloo = gloo_tallies(_known_of_gloo)
    return {**changed, **of_gloo} if of_gloo else changed


def in_flight() -> tuple[dict[str, Tally], list[Begun]]:
    """All tallies, and the last calls of this rank, the oldest first."""
    keys = {(group.identity, group.generation): group.key for group in list(live)}
    begun = [
        Begun(
            keys[call.group, call.generation],
            call.sequence,
            where(call.operation, CallSite(call.cell, call.line)),
            call.root if call.is_message else None,
        )
        for call in recent_calls(0)
        if (call.group, call.generation) in keys
    ]
    return {**tallies({})[1], **gloo_tallies({})[1]}, begun


def renew_differing_gloo(comm: Any) -> None:
    """Renew the gloo groups on which ranks have begun different calls.

    Every rank must call.

    Args:
        comm: An mpi4py communicator over all ranks.
    """
    tables = comm.allgather(gloo_tallies({})[1])
    keys = {each.group for each in left_over(dict(enumerate(tables)))}
    if keys:  # on all ranks
        failed: dict[str, str] = {}
        for each in comm.allgather(renew_gloo(keys)):
            failed |= each
        refuse_gloo(failed)


def unseen_error() -> tuple[BaseException, str] | None:
    """The first error of an asynchronous call of this cell that nobody has waited for.

    Calls under way have a moment to end. The errors of earlier cells are printed.

    Returns:
        The error, and the line that made the call.
    """
    settle_calls(SETTLE_S)
    own = None
    for call, error, is_old in unseen_errors():
        text = f"{error}\nno wait() has raised this error of the asynchronous {call}"
        if is_old:
            print(f"{type(error).__name__}: {text}", file=sys.stderr)
        elif own is None:
            own = type(error)(text), call.partition(" of ")[2]
    return own


def with_unseen(failure: Failure | None) -> Failure | None:
    """The failure of a cell, or else one of `unseen_error`."""
    if failure is not None or (unseen := unseen_error()) is None:
        return failure
    info = this_rank().info
    (error, place), name = unseen, type(unseen[0]).__name__
    return Failure(info.rank, info.host, name, str(error), place)
