"""Elastic runs on a rank: what it tells the notebook, and what it does at its word.

While the main thread is paused in an elastic run, the notebook has it carry out orders,
functions of this package, by way of the control channel; their results go back as
notices, for the control thread must stay free to answer.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nbdist.engine.calls import export_variables
from nbdist.engine.rank import this_rank
from nbdist.engine.rpc_server import describe, function_of
from nbdist.ipc import private_files
from nbdist.ipc.shm_payload import Shipment
from nbdist.training.elastic.coordinator import install
from nbdist.wire import ElasticCall, Notice, Resume, Verdict

__all__ = [
    "attend",
    "begin_from",
    "decide",
    "defer",
    "expect",
    "order",
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
        self.resize_request = 0
        """Number of the last resize request that this rank was told of."""
        self.resume: Resume | None = None
        self.expected: ElasticCall | None = None
        """The call of the others that this rank, a newcomer, is to join."""
        self.pauses = 0
        self.orders: queue.SimpleQueue[Order | Verdict] = queue.SimpleQueue()
        self._completed_resize = 0
        self._call: ElasticCall | None = None
        self._request = ""
        self._index = 0

    @property
    def resize_wanted(self) -> bool:
        """See `Coordinator`."""
        return self.resize_request > self._completed_resize

    @property
    def commit_folders(self) -> Sequence[Path]:
        """See `Coordinator`. They are on the notebook's host only."""
        with contextlib.suppress(OSError):
            folders = private_files.commit_folders(this_rank().run_dir)
            return [folder for folder in folders if folder.is_dir()]
        return []

    def enter(self, call: ElasticCall) -> str:
        """See `Coordinator`."""
        rank = this_rank()
        if rank.request != self._request:
            self._request, self._index = rank.request, 0
            if rank.info.rank == 0 and self.expected is None:
                self._remove_commits()
        call = replace(call, index=self._index)
        self._index += 1
        expected = self.expected
        if expected is not None and call.index < expected.index:
            return "skip"
        self.expected = None
        self._call = call
        self._completed_resize = self.resize_request  # earlier ones were for other runs
        rank.notify(Notice("entered", call))
        return "begin" if expected is None else "join"

    def _remove_commits(self) -> None:
        """Remove those of an earlier cell: another run is not to go on from them."""
        for folder in self.commit_folders:
            for path in folder.iterdir():
                path.unlink()

    def leave(self) -> None:
        """See `Coordinator`."""
        call, self._call = self._call, None
        assert call is not None
        this_rank().notify(Notice("left", call))

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
        with this_rank().interrupts.deferred():
            while isinstance(first, Order):
                this_rank().notify(self._carry_out(first, call))
                first = self.orders.get()
        if first.action == "interrupt":
            raise KeyboardInterrupt
        self._completed_resize = max(self._completed_resize, first.completed_resize)
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


def want_resize(request: int) -> None:
    """Have the next commit in an elastic run end in a pause, on all ranks.

    Args:
        request: Number of the resize request. A completed one has no effect.
    """
    _coordinator.resize_request = max(_coordinator.resize_request, request)


def begin_from(resume: Resume | None) -> None:
    """Let every new `State` begin from a file.

    Raises:
        OSError: It is trusted, and another user may have written it.
    """
    if resume is not None and resume.trusted:
        private_files.check_file(Path(resume.path))
    _coordinator.resume = resume


def variables() -> Shipment:
    """This rank's variables.

    The control thread packs them, as the main thread may be stuck in MPI.
    """
    shipment, _lost = export_variables()
    return shipment


def defer() -> Any:
    """Acknowledge the first order of a pause, from which on interrupts are deferred."""
    return this_rank().info.rank
