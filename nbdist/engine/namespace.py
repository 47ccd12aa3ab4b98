"""A rank's variables as a whole: what a newcomer gets from one who was there.

All ranks wait meanwhile, so a variable that takes long to pickle or unpickle is left
out.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from nbdist.engine.rank import this_rank
from nbdist.engine.user_code import transfer_step
from nbdist.errors import TransferError, text_of
from nbdist.ipc import serialization, shm_payload

__all__ = ["adopt", "export"]

VARIABLE_LIMIT_S = 5.0
"""Seconds that one variable may take."""
TOTAL_LIMIT_S = 20.0
"""Seconds that all may take together, on the one rank and then on the other."""


def export(skip: Collection[str] = ()) -> tuple[shm_payload.Shipment, dict[str, str]]:
    """The user's variables, as far as they can be pickled in time.

    They travel together, so that an optimizer still refers to its model's parameters.

    Args:
        skip: Names that are left out.

    Returns:
        The variables, and for each other one why it is not among them.

    Raises:
        TransferError: It was interrupted; the message says in what.
    """
    clock = _Clock("pickle")
    rank = this_rank()
    namespace = rank.shell.user_global_ns
    good = {name: v for name, v in _variables().items() if name not in skip}
    bad: dict[str, str] = {}
    for name, value in list(good.items()):
        try:
            with clock.step(name):
                serialization.dumps(value, namespace)
        except _CannotTravel as error:
            del good[name]
            bad[name] = str(error)
    while True:
        try:
            frames = serialization.dumps_named(good, namespace, clock.step)
        except _CannotTravel as error:  # although it could be pickled alone
            del good[clock.name]
            bad[clock.name] = str(error)
        else:
            return shm_payload.load(frames, rank.run_dir), bad


def adopt(shipment: shm_payload.Shipment) -> tuple[str, str] | None:
    """Take the variables of another rank: all of them, or none.

    Returns:
        None; else a variable that could not be unpickled in time, and why.

    Raises:
        TransferError: It was interrupted; the message says in what.
    """
    clock = _Clock("unpickle")
    rank = this_rank()
    try:
        values = serialization.loads_named(shm_payload.frames_of(shipment), clock.step)
    except _CannotTravel as error:
        return clock.name, str(error)
    rank.shell.push(values)
    # A function from another rank brings the globals that it uses, `rank` among them.
    rank.tell_namespace()
    return None


class _CannotTravel(TransferError):
    """A variable is left out; the message says why, without its name."""


class _Clock:
    """Limits each variable's time, and that of all."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._end = time.monotonic() + TOTAL_LIMIT_S
        self.name = ""
        """The variable that was begun last."""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.name = name
        left = self._end - time.monotonic()
        if left <= 0:
            raise _CannotTravel(f"not begun: all may take {TOTAL_LIMIT_S:g} s")
        limit_s = min(left, VARIABLE_LIMIT_S)
        try:
            with transfer_step(f"{self._verb[:-1]}ing {name!r}", limit_s):
                yield
        except KeyboardInterrupt as interrupt:
            # To a rank paused in an elastic run, a KeyboardInterrupt is no answer.
            raise TransferError(f"interrupted {interrupt}") from None
        except TransferError as error:
            if error.__cause__ is None:
                why = f"did not {self._verb} within {limit_s:.2g} s"
                raise _CannotTravel(why) from None
            raise _CannotTravel(text_of(error.__cause__)) from error


def _variables() -> dict[str, Any]:
    shell = this_rank().shell
    return {
        name: value
        for name, value in shell.user_ns.items()
        if not name.startswith("_") and name not in shell.user_ns_hidden
    }
