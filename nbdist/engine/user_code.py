"""Runs user code outside of cells, such as the pickling or printing of a value."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nbdist.engine import cell_names
from nbdist.engine.interrupts import Overdue
from nbdist.engine.rank import is_rank, this_rank
from nbdist.errors import TransferError, text_of

__all__ = ["end_forked_child", "step", "transfer_step"]


def end_forked_child(code: int = 0) -> None:
    """End this process if it is a child that user code has forked.

    A child that returns from user code must not continue with the rank's sockets.
    """
    if os.getpid() != this_rank().info.pid:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


@contextmanager
def step(what: str, limit_s: float | None = None) -> Iterator[None]:
    """Deliver SIGINT within this block, with an error that names the step.

    Outside of the main thread this does nothing, because only that thread gets signals.

    Args:
        what: The step's name, such as "pickling 'x'". `%dist_status` shows it.
        limit_s: The most seconds that the step may take; None means no limit.

    Raises:
        TransferError: The step took longer.
        KeyboardInterrupt: The step was interrupted. The message names it and the line.
    """
    rank = this_rank() if is_rank() else None
    if rank is None or threading.get_ident() != rank.main_thread:
        yield
        return
    interrupts = rank.interrupts
    try:
        rank.step = what
        with interrupts.armed() if limit_s is None else interrupts.limited(limit_s):
            yield
    except Overdue:
        raise TransferError(f"{what} took longer than {limit_s:g} s") from None
    except KeyboardInterrupt as interrupt:
        if not interrupts.delivered:  # the user's code has raised it
            raise
        line = cell_names.last_line(interrupt)
        at = f", at {line}" if line else ""
        raise KeyboardInterrupt(f"while {what}{at}") from None
    finally:
        rank.step = ""


@contextmanager
def transfer_step(what: str, limit_s: float | None = None) -> Iterator[None]:
    """A `step` in which any error of the user's code becomes a TransferError.

    Raises:
        TransferError: The message names the step. The user's own error is its cause.
        KeyboardInterrupt: As `step` does, if the step was interrupted.
    """
    try:
        with step(what, limit_s):
            yield
    except TransferError:
        raise
    except BaseException as error:
        # User code may raise anything, also SystemExit and KeyboardInterrupt.
        is_own = is_rank() and not this_rank().interrupts.delivered
        if isinstance(error, KeyboardInterrupt) and not is_own:
            raise
        raise TransferError(f"{what}: {text_of(error)}") from error
