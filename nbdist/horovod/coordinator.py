"""Matches the ranks' calls by name.

Calls go to the collectives in the order in which this rank makes them. While all ranks
make them in one order, as almost every program does, nothing else is sent: the barrier
of each collective compares the names. When the barrier finds that the ranks' calls
differ, which touches no data, the ranks exchange lists of their calls and make those
that all of them have, in one order. `join` works in the same way: a rank without data
says so, and takes part in the others' reductions with neutral elements from then on.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from nbdist.collectives import Group, all_gather_object, signature
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

__all__ = ["Coordinator"]


class Coordinator:
    """The calls of this rank on one group, and their order."""

    def __init__(self, group: Group) -> None:
        """Take a group, on which no other code may make calls."""
        self.group = group
        self._pending: dict[str, Request] = {}
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        """Held by the thread that makes calls."""
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each submitted call; False ends the thread."""
        self._unnamed: Counter[str] = Counter()
        self.optimizers = itertools.count()
        """Numbers of the optimizers whose gradients are reduced here."""
        self._waiting = 0
        self._stirred = False
        """Whether this rank's offers may have changed."""
        self._joined: frozenset[int] = frozenset()
        self._last_joined = -1
        self._generation = group.generation

    # -- calls ---------------------------------------------------------------------

    def name(self, operation: str, given: str | None) -> str:
        """The name of a call on all ranks: the user's, or the number of the call."""
        if given is not None:
            return f"{operation}.{given}"
        self._unnamed[operation] += 1
        return f"{operation}.noname.{self._unnamed[operation]}"

    def submit(self, request: Request) -> None:
        """Start a call and return at once.

        Raises:
            UsageError: A call of this name is under way.
        """
        self._add(request)
        if self._thread is None:
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
        if self._pending or not self._turn.acquire(blocking=False):
            self.submit(request)
            self.wait(request)
            return
        try:  # in this thread, which saves two thread switches
            self._add(request)
            with self._waits():
                while not request.handle.is_completed():
                    self._step()
        except BaseException as error:  # an interrupt between two calls
            self._finish(request, error)
            raise
        finally:
            self._turn.release()
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
            self._stir()
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
        self._stir()

    def close(self) -> None:
        """End all calls and the thread. Safe to call twice."""
        self.group.close()
        self._stir()
        self._work.put(False)

    def _add(self, request: Request) -> None:
        self._refresh()
        with self._changed:
            if request.name in self._pending:
                raise UsageError(
                    f"{request.kind.operation}: a call named {request.name!r} is under "
                    "way; synchronize() it first, or give another name"
                )
            self._pending[request.name] = request
            if not self._stirred:
                self._stirred = True
                self._changed.notify_all()

    def _refresh(self) -> None:
        """Fail the calls that were made before the group was renewed."""
        if self._generation != self.group.generation:
            self._generation, self._joined = self.group.generation, frozenset()
            self._fail_all(CollectiveAborted("the group of ranks was renewed"))

    def _stir(self) -> None:
        with self._changed:
            self._stirred = True
            self._changed.notify_all()

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Mark this thread as waiting for a call: it makes no other call meanwhile."""
        with self._changed:
            self._waiting += 1
            if self._waiting == 1:
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    # -- turns ---------------------------------------------------------------------

    def _serve(self) -> None:
        while self._work.get():
            while self._pending:
                with self._turn:
                    self._step()

    def _step(self) -> None:
        """Make this rank's oldest call, or all calls that the ranks have in common."""
        self._refresh()
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
        """Make one call on all ranks, to its end or its error.

        Raises:
            CollectiveMismatch: The ranks' calls differ. The call is still pending.
        """
        error: BaseException | None = None
        try:
            self.group.run(
                request.kind,
                request.body,
                has_barrier=request.has_barrier,
                call_site=request.call_site,
            )
        except CollectiveMismatch:
            raise
        except BaseException as failure:  # noqa: BLE001 - the waiter raises it
            error = failure
        self._finish(request, error)
        if self.group.broken:
            assert error is not None
            self._fail_all(error)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        with self._changed:
            self._pending.pop(request.name, None)
        request.handle.complete(error)

    def _all_joined_at_once(self) -> None:
        self._last_joined = self.group.size - 1

    # -- negotiation ---------------------------------------------------------------

    def _negotiate(self, mismatch: CollectiveMismatch | None) -> None:
        """Make the calls that all ranks have in common, as soon as there are some.

        Every rank of the group runs this, and decides with the same table of offers.
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
            if self._settle(table, mismatch):
                return
            self._await_news()

    def _offers(self) -> Offers:
        with self._changed:
            self._stirred = False
            calls = {name: request.offer for name, request in self._pending.items()}
            return Offers(calls, self._waiting > 0, self._unnamed)

    def _settle(self, table: list[Offers], mismatch: CollectiveMismatch | None) -> bool:
        """Act on the ranks' offers. Returns whether the negotiation has ended."""
        joined = frozenset(rank for rank, each in enumerate(table) if each.joined)
        newly = joined - self._joined or joined
        self._joined = joined
        active = [each for rank, each in enumerate(table) if rank not in joined]
        if not active:
            for each in table:  # a joined rank has not counted the others' calls
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
        """This rank's part in a reduction of the others, after it has joined."""
        assert offer.stand_in is not None
        body = offer.stand_in.body(self.group.transport(offer.stand_in.device))
        return Request(
            name, offer.kind, body, self.abort, has_barrier=offer.has_barrier
        )

    def _end_join(self, last: int) -> None:
        self._joined = frozenset()
        self._last_joined = last
        self._finish(self._pending[JOIN])

    def _fail_all(self, error: BaseException) -> None:
        for request in list(self._pending.values()):
            self._finish(request, error)

    def _await_news(self) -> None:
        """Wait until this rank has made another call or waits for one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stirred or self._waiting or self.group.broken
            )
