"""Matches the ranks' calls by name.

A coordinator makes collective calls in the order in which its rank submits them. The
barrier of each collective compares the calls' names. If all ranks submit calls in the
same order, as in almost every program, this is the only comparison. If the calls
differ, the barrier raises before any data has changed. The ranks then exchange lists of
their calls, and make the calls that all of them have submitted, in one order.

`join` uses the same exchange. A joined rank takes part in the other ranks' reductions
with elements that do not change the result.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import torch

from nbdist.collectives import Group, all_gather_object, signature
from nbdist.collectives.call_site import where
from nbdist.errors import CollectiveAborted, CollectiveMismatch, UsageError
from nbdist.horovod.negotiation import (
    JOIN,
    Offer,
    Offers,
    Request,
    in_common,
    needs_all,
    nothing_in_common,
)
from nbdist.horovod.timeline import running
from nbdist.ipc.locks import Condition
from nbdist.training import lasting

__all__ = ["Coordinator"]

_OPTIMIZERS = "optimizers"


class Coordinator:
    """The calls of this rank on one group, and their order."""

    def __init__(self, group: Group) -> None:
        """Make a coordinator for a group. No other code may make calls on the group."""
        self.group = group
        self._pending: dict[str, Request] = {}
        # A `with` statement of this lock is safe from interrupts, because C code enters
        # and leaves it. An interrupt inside `Condition.__enter__` would leave it taken.
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._turn = threading.Lock()
        """Held by the thread that makes calls."""
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each call submitted; False ends the thread."""
        self._unnamed: Counter[str] = Counter()
        self._waiting: set[int] = set()
        """The threads that wait for a call."""
        self._submitted = 0
        """As `Tally.calls`: all ranks submit the same names, in any order."""
        group.submitted = self._count
        self._offers_changed = False
        """Whether this rank's offers may have changed."""
        self._joined: frozenset[int] = frozenset()
        self._last_joined = -1
        self._generation = group.generation
        lasting.register(self)

    def _begin_again(self) -> None:
        """Leave no thread waiting, and no offer without notice.

        An interrupt can end `_waits` before its `try`, and `_add` before its notice.
        `_refresh` does the rest.
        """
        self._waiting.clear()
        self._note_change()

    # -- calls ---------------------------------------------------------------------

    def name(self, operation: str, given: str | None) -> str:
        """The name of a call: the given name, or one with the number of the call.

        All ranks number their calls in the order in which they make them.
        """
        if given is not None:
            return f"{operation}.{given}"
        self._refresh()
        self._unnamed[operation] += 1
        return f"{operation}.noname.{self._unnamed[operation]}"

    def _count(self) -> int:
        return self._submitted if self._generation == self.group.generation else 0

    def number_optimizer(self) -> int:
        """The number of a further optimizer whose gradients this reduces."""
        number = self.group.counters.get(_OPTIMIZERS, 0)
        self.group.counters[_OPTIMIZERS] = number + 1
        return number

    def submit(self, request: Request) -> None:
        """Start a call and return at once.

        Raises:
            UsageError: A call of this name is under way.
        """
        self._add(request)
        # An interrupt may have left a thread that was not started.
        if self._thread is None or self._thread.ident is None:
            self._thread = threading.Thread(
                target=self._serve, name="nbdist horovod", daemon=True
            )
            self._thread.start()
        self._work.put(True)

    def run(self, request: Request) -> None:
        """Make a call and wait for its end.

        Raises:
            UsageError: A call of this name is under way.
            BaseException: The error of a call that has failed.
        """
        if self._pending or self._turn.locked():
            self.submit(request)
            self.wait(request)
            return
        try:  # in this thread, which saves two thread switches
            self._add(request)
            with self._waits():
                while not request.handle.is_completed():
                    with self._turn:
                        self._step()
        except BaseException as error:  # an interrupt between two calls
            self._finish(request, error)
            raise
        request.handle.wait()

    def wait(self, request: Request) -> None:
        """Wait for the end of a call.

        Raises:
            BaseException: The error of a call that has failed.
        """
        if not request.handle.is_completed():
            with self._waits():
                request.handle.wait()
        else:
            request.handle.wait()

    def poll(self, request: Request) -> bool:
        """Whether a call has ended. Does not wait."""
        if not request.handle.is_completed():
            self._note_change()
        return request.handle.is_completed()

    def join(self) -> int:
        """Take part in the others' reductions until all ranks have joined.

        Returns:
            The last rank to join, by its position in the group.
        """
        kind = signature(JOIN, None, None, None, (), "none")
        self.run(Request(JOIN, kind, self._all_joined_at_once, self.abort))
        return self._last_joined

    def abort(self, error: BaseException) -> None:
        """Release this process's waits for other ranks. Any thread may call."""
        self.group.abort(error)
        self._note_change()

    def close(self) -> None:
        """End all calls and the thread. Safe to call twice."""
        self.group.close()
        self._note_change()
        self._work.put(False)

    def _add(self, request: Request) -> None:
        self._refresh()
        request.use_gpu(self.group.gpu)
        with self._lock:
            if request.name in self._pending:
                raise UsageError(
                    f"{request.kind.operation}: a call named {request.name!r} is under "
                    "way; synchronize() it first, or give another name"
                )
            self._pending[request.name] = request
            self._submitted += crc32(request.name.encode()) << 32 | 1
            if not self._offers_changed:
                self._offers_changed = True
                self._changed.notify_all()

    def _refresh(self) -> None:
        """Begin again after a renewal of the group, which has ended all calls."""
        if self._generation == self.group.generation:
            return
        with self._lock:  # the thread of the calls may be here too
            if self._generation == self.group.generation:
                return
            ended = list(self._pending.values())
            self._pending.clear()
            self._unnamed.clear()
            self._submitted, self._joined = 0, frozenset()
            self._generation = self.group.generation
        for request in ended:
            what = where(request.kind.operation, request.call_site)
            error = CollectiveAborted(f"{what} was {self.group.renewal}")
            request.handle.complete(error)

    def _note_change(self) -> None:
        with self._lock:
            self._offers_changed = True
            self._changed.notify_all()

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Mark this thread as waiting for a call. It makes no other call meanwhile."""
        thread = threading.get_ident()
        with self._lock:
            self._waiting.add(thread)
            if len(self._waiting) == 1:
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(thread)

    # -- turns ---------------------------------------------------------------------

    def _serve(self) -> None:
        while self._work.get():
            while self._pending:
                with self._turn:
                    self._step()

    def _step(self) -> None:
        """Make this rank's oldest call, or all calls that the ranks have in common."""
        self._refresh()
        timeline = running()
        if timeline is not None:
            timeline.mark_cycle()
        request = next(iter(self._pending.values()), None)
        if request is None:
            return
        if self._joined:
            self._negotiate(None)
            return
        try:
            self._make(request)
        except CollectiveMismatch as mismatch:
            self._negotiate(mismatch)

    def _make(self, request: Request) -> None:
        """Make one call on all ranks, and complete its handle.

        Raises:
            CollectiveMismatch: The ranks' calls differ. The call is still pending.
        """
        error: BaseException | None = None
        timeline = running()
        record = None if timeline is None else timeline.call(request)
        try:
            self.group.run(
                request.kind,
                request.body if record is None else record.timed(request.body),
                has_barrier=request.has_barrier,
                call_site=request.call_site,
            )
        except CollectiveMismatch:
            raise
        except BaseException as failure:  # noqa: BLE001 - the waiter raises it
            error = failure
        if record is not None:
            record.end(error)
        self._finish(request, error)
        if self.group.broken:
            assert error is not None
            self._fail_all(error)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        with self._lock:
            # After a renewal there may be another call of this name.
            if self._pending.get(request.name) is request:
                del self._pending[request.name]
        request.handle.complete(error)

    def _all_joined_at_once(self) -> None:
        self._last_joined = self.group.size - 1

    # -- negotiation ---------------------------------------------------------------

    def _negotiate(self, mismatch: CollectiveMismatch | None) -> None:
        """Make the calls that all ranks have in common, as soon as there are some.

        Every rank of the group runs this. All ranks have the same table of offers, so
        they make the same decision.
        """
        while self._pending and self._generation == self.group.generation:
            try:
                table: list[Offers] = all_gather_object(
                    self._offers(), group=self.group
                )
            except CollectiveMismatch:
                continue  # a rank is still in an earlier call
            except BaseException as failure:  # noqa: BLE001 - the waiter raises it
                self._fail_all(failure)
                return
            if self._act_on(table, mismatch):
                return
            self._await_change()

    def _offers(self) -> Offers:
        with self._lock:
            self._offers_changed = False
            calls = {name: request.offer for name, request in self._pending.items()}
            return Offers(calls, bool(self._waiting), self._unnamed)

    def _act_on(self, table: list[Offers], mismatch: CollectiveMismatch | None) -> bool:
        """Act on the ranks' offers. Returns whether the negotiation has ended."""
        joined = frozenset(rank for rank, each in enumerate(table) if each.joined)
        newly = joined - self._joined or joined
        self._joined = joined
        active = [each for rank, each in enumerate(table) if rank not in joined]
        if not active:
            for each in table:  # a joined rank has not counted the other ranks' calls
                self._unnamed |= each.unnamed
            self._end_join(max(newly))
            return True
        common = in_common(active)
        for name, offer in common.items():
            self._make_agreed(name, offer, bool(joined))
        if not common and all(each.waits for each in table):
            self._fail_all(nothing_in_common(table, self.group.ranks, mismatch))
            return True
        return bool(common)

    def _make_agreed(self, name: str, offer: Offer, some_joined: bool) -> None:
        request = self._pending.get(name)
        if some_joined and offer.stand_in is None:
            if request is not None:
                self._finish(request, needs_all(offer.kind))
            return
        if request is None:
            request = self._stand_in(name, offer)
        try:
            self._make(request)
        except CollectiveMismatch as error:  # one name for two different calls
            self._finish(request, error)

    def _stand_in(self, name: str, offer: Offer) -> Request:
        """The request with which a joined rank takes part in the others' reduction."""
        assert offer.stand_in is not None
        device, gpu = offer.stand_in.device, self.group.gpu
        own = gpu if device == "cuda" and gpu is not None else torch.device(device)
        body = offer.stand_in.body(self.group.transport(own), own)
        request = Request(
            name, offer.kind, body, self.abort, has_barrier=offer.has_barrier
        )
        request.use_gpu(gpu)
        return request

    def _end_join(self, last: int) -> None:
        self._joined = frozenset()
        self._last_joined = last
        self._submitted = 0  # the ranks that joined first have submitted fewer calls
        self._finish(self._pending[JOIN])

    def _fail_all(self, error: BaseException) -> None:
        for request in list(self._pending.values()):
            self._finish(request, error)

    def _await_change(self) -> None:
        """Wait until this rank has submitted another call, or waits for one."""
        with self._lock:
            self._changed.wait_for(
                lambda: self._offers_changed or self._waiting or self.group.broken
            )
