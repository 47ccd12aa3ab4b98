"""Elastic runs on a rank: what it tells the notebook, and what it does at its word.

While the main thread is paused in an elastic run, the notebook has it carry out orders,
functions of this package, by way of the control channel; their results go back as
notices, for the control thread must stay free to answer.
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nbdist.engine import namespace, private_files
from nbdist.engine.rank import this_rank
from nbdist.engine.requests import describe, function_of
from nbdist.engine.shipping import Shipment
from nbdist.training.elastic.coordinator import install
from nbdist.wire import ElasticCall, Notice, Resume, Verdict

__all__ = [
    "attend",
    "begin_from",
    "decide",
    "expect",
    "hold",
    "keep_commits",
    "order",
    "preserve",
    "variables",
    "want_resize",
]


class Order(NamedTuple):
    """Something to do in a pause."""

    token: int
    target: str
    args: tuple[object, ...]


class NotebookCoordinator:
    """Asks the notebook what follows a failure. One for each rank."""

    def __init__(self) -> None:
        self.wish = 0
        """The last wish for another size that this rank has heard of."""
        self.resume: Resume | None = None
        self.vault: Path | None = None
        self.expected: ElasticCall | None = None
        """The call of the others that this rank, a newcomer, is to join."""
        self.pauses = 0
        self.orders: queue.SimpleQueue[Order | Verdict] = queue.SimpleQueue()
        self.preserve: Callable[[Path], None] | None = None
        """Writes the last commit of the run that is under way."""
        self._granted = 0
        self._call: ElasticCall | None = None
        self._request = ""
        self._index = 0

    @property
    def resize_wanted(self) -> bool:
        """See `Coordinator`."""
        return self.wish > self._granted

    def enter(self, call: ElasticCall, preserve: Callable[[Path], None]) -> str:
        """See `Coordinator`."""
        rank = this_rank()
        if rank.request != self._request:
            self._request, self._index = rank.request, 0
        call = replace(call, index=self._index)
        self._index += 1
        expected = self.expected
        if expected is not None and call.index < expected.index:
            return "skip"
        self.expected = None
        self._call, self.preserve = call, preserve
        self._granted = self.wish  # one from before was for a run that is over
        rank.notify(Notice("entered", call))
        return "begin" if expected is None else "join"

    def leave(self) -> None:
        """See `Coordinator`."""
        call, self._call, self.preserve = self._call, None, None
        assert call is not None
        this_rank().notify(Notice("left", call))

    def keep_commit(self, write: Callable[[Path], None]) -> None:
        """See `Coordinator`."""
        if self.vault is not None and (problem := _write_commit(write, self.vault)):
            warnings.warn(f"a commit was not written: {problem}", stacklevel=2)

    def pause(self, reason: str, commit: int, error: BaseException | None) -> Verdict:
        """See `Coordinator`. An interrupt gets through until the first order."""
        call = self._call
        assert call is not None
        self.pauses += 1
        self.orders = queue.SimpleQueue()
        text = "" if error is None else f"{type(error).__name__}: {error}"
        this_rank().notify(Notice("paused", call, self.pauses, reason, commit, text))
        first = self.orders.get()
        # What ranks do together, each must do to its end.
        with this_rank().interrupts.held():
            while isinstance(first, Order):
                this_rank().notify(self._carry_out(first, call))
                first = self.orders.get()
        if first.action == "interrupt":
            raise KeyboardInterrupt
        self._granted = max(self._granted, first.granted)
        return first

    def _carry_out(self, order: Order, call: ElasticCall) -> Notice:
        answer = Notice("answered", call, self.pauses, token=order.token)
        try:
            return replace(answer, value=function_of(order.target)(*order.args))
        except Exception as error:  # noqa: BLE001 - it is the notebook's to judge
            return replace(answer, ok=False, value=describe(error))


_coordinator = NotebookCoordinator()


def attend() -> None:
    """Have elastic runs on this rank ask the notebook."""
    install(_coordinator)


# The notebook calls these, by way of the control channel.


def order(pause: int, token: int, target: str, *args: object) -> None:
    """Have the main thread do something in its pause; nothing once that is over."""
    if pause == _coordinator.pauses:
        _coordinator.orders.put(Order(token, target, args))


def decide(pause: int, verdict: Verdict) -> None:
    """End a pause."""
    if pause == _coordinator.pauses:
        _coordinator.orders.put(verdict)


def expect(call: ElasticCall | None) -> None:
    """The cell that comes next is one of which the others are in this call already."""
    _coordinator.expected = call


def want_resize(wish: int) -> None:
    """Let the next commit in an elastic run end in a pause, on all ranks.

    Args:
        wish: Counts the wishes; one that was granted already is none.
    """
    _coordinator.wish = max(_coordinator.wish, wish)


def begin_from(resume: Resume | None) -> None:
    """Let every new `State` begin from a file.

    Raises:
        OSError: It is trusted, and another user may have written it.
    """
    if resume is not None and resume.trusted:
        private_files.check_file(Path(resume.path))
    _coordinator.resume = resume


def keep_commits(path: str | None) -> None:
    """Have rank 0 write each commit of an elastic run to this file."""
    _coordinator.vault = None if path is None else Path(path)


def preserve(path: str) -> str:
    """Write the last commit of a paused run to a file; why that failed, or ""."""
    write = _coordinator.preserve
    return "" if write is None else _write_commit(write, Path(path))


def _write_commit(write: Callable[[Path], None], path: Path) -> str:
    """Have a commit written, to the run folder if there is no room at `path`.

    Returns:
        Why it was written to neither; "" where it was.
    """
    problem = ""
    places = path, this_rank().run_dir / path.name
    for place in places:
        try:
            write(place)
        # No room, or a value that refuses to be pickled in a way of its own.
        except Exception as error:  # noqa: BLE001
            problem = f"{type(error).__name__}: {error}"
        else:
            for other in {*places} - {place}:  # an older one
                other.unlink(missing_ok=True)
            return ""
    return problem


def variables() -> Shipment:
    """This rank's variables.

    The agent packs them: the main thread, which may be stuck in MPI, changes nothing.
    """
    shipment, _lost = namespace.export()
    return shipment


def hold() -> Any:
    """The first order of a recovery: from here on an interrupt waits for its end."""
    return this_rank().info.rank
