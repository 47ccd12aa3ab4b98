"""Elastic runs on a rank: notices to the notebook, and orders from it.

While the main thread is paused in an elastic run, the notebook sends it orders on the
control channel: functions of this package to call. Their results go back as notices,
because the control thread must stay free to answer.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nbdist.engine import cuda_context
from nbdist.engine.calls import export_variables
from nbdist.engine.rank import this_rank
from nbdist.engine.rpc_server import describe, function_of
from nbdist.ipc import private_files
from nbdist.ipc.shm_payload import Shipment
from nbdist.training.elastic.coordinator import install
from nbdist.wire import ElasticCall, Notice, Resume, Verdict

__all__ = [
    "begin_from",
    "decide",
    "defer",
    "expect",
    "install_coordinator",
    "order",
    "variables",
    "want_resize",
    "want_save",
]


class Order(NamedTuple):
    """A function that the main thread is to call during a pause."""

    token: int
    target: str
    args: tuple[object, ...]


class NotebookCoordinator:
    """The `Coordinator` of a rank. It asks the notebook what follows a failure."""

    def __init__(self) -> None:
        self.resize_request = 0
        """Number of the last resize request that this rank has received."""
        self.save_wanted = False
        self.resume: Resume | None = None
        self.expected: ElasticCall | None = None
        """The elastic call that this rank joins, if it is new in the world."""
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
        """See `Coordinator`."""
        with contextlib.suppress(OSError):
            folders = private_files.commit_folders(this_rank().run_dir)
            return [folder for folder in folders if folder.is_dir()]
        return []

    def enter(self, call: ElasticCall) -> str:
        """See `Coordinator`."""
        rank = this_rank()
        if rank.request != self._request:
            self._request, self._index = rank.request, 0
            # A later rank 0 may be on this host too.
            if rank.info.local_rank == 0 and self.expected is None:
                self._remove_commits()
        call = replace(call, index=self._index)
        self._index += 1
        expected = self.expected
        if expected is not None and call.index < expected.index:
            return "skip"
        self.expected = None
        self._call = call
        self._completed_resize = self.resize_request  # an earlier run's
        rank.notify(Notice("entered", call))
        return "begin" if expected is None else "join"

    def _remove_commits(self) -> None:
        """Remove this host's commits of earlier cells, which no run must continue."""
        for folder in self.commit_folders:
            for path in folder.iterdir():
                path.unlink()

    def leave(self) -> None:
        """See `Coordinator`."""
        call, self._call = self._call, None
        assert call is not None
        this_rank().notify(Notice("left", call))

    def end_rank(self, reason: str) -> None:
        """See `Coordinator`."""
        cuda_context.end_rank(reason)

    def pause(self, reason: str, commit: int, error: BaseException | None) -> Verdict:
        """See `Coordinator`. Interrupts are deferred from the first order on."""
        call = self._call
        assert call is not None
        self.pauses += 1
        self.orders = queue.SimpleQueue()
        text = "" if error is None else f"{type(error).__name__}: {error}"
        this_rank().notify(Notice("paused", call, self.pauses, reason, commit, text))
        first = self.orders.get()
        # The ranks carry out an order together, so each must complete it.
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
        except Exception as error:  # noqa: BLE001 - the notebook decides what follows
            return replace(answer, ok=False, value=describe(error))


_coordinator = NotebookCoordinator()


def install_coordinator() -> None:
    """Make elastic runs on this rank ask the notebook."""
    install(_coordinator)


# The notebook calls these functions on the control channel.


def order(pause: int, token: int, target: str, *args: object) -> None:
    """Have the main thread call a function, if it is still in this pause.

    Args:
        pause: The number of the pause.
        token: Identifies the order in the notice that answers it.
        target: The function, an endpoint.
        args: Its arguments.
    """
    if pause == _coordinator.pauses:
        _coordinator.orders.put(Order(token, target, args))


def decide(pause: int, verdict: Verdict) -> None:
    """End a pause of the main thread, if it is still in it."""
    if pause == _coordinator.pauses:
        _coordinator.orders.put(verdict)


def expect(call: ElasticCall | None) -> None:
    """Set the elastic call that the next cell joins. The other ranks are in it."""
    _coordinator.expected = call


def want_resize(request: int) -> None:
    """Make all ranks pause at the next commit of an elastic run.

    Args:
        request: Number of the resize request. A completed request has no effect.
    """
    _coordinator.resize_request = max(_coordinator.resize_request, request)


def want_save() -> None:
    """Make rank 0 write its next commit to the file of the state's `path`."""
    _coordinator.save_wanted = True


def begin_from(resume: Resume | None) -> None:
    """Make every new `State` begin with the values of a file.

    Raises:
        OSError: The file is trusted, but another user may have written it.
    """
    if resume is not None and resume.trusted:
        private_files.check_file(Path(resume.path))
    _coordinator.resume = resume


def variables() -> Shipment:
    """This rank's variables, packed by the control thread.

    The main thread may be blocked in MPI.
    """
    return export_variables()[0]


def defer() -> Any:
    """Do nothing. As the first order of a pause, it makes the rank defer interrupts.

    Returns:
        The number of the rank.
    """
    return this_rank().info.rank
