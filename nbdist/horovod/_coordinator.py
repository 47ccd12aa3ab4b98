"""Matching the ranks' calls by name.

Calls go to the collectives in the order in which this rank makes them. While all ranks
make them in one order, as almost every program does, nothing else is sent: the names
are compared by the gate that each collective passes anyway. Only when the gate finds
that the ranks have come with different calls, which touches no data, they tell each
other what they have and make those calls that all of them have, in one order. The same
serves `join`: a rank without data tells so, and from then on stands in with neutral
elements for whatever the others reduce.
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

from ._offers import JOIN, Offer, Offers, in_common, needs_all, nothing_in_common
from ._request import Request

__all__ = ["Coordinator"]


class Coordinator:
    """The calls of this rank on one group, and their order."""

    def __init__(self, group: Group) -> None:
        """Take over a group on which nobody else makes calls."""
        self.group = group
        self._pending: dict[str, Request] = {}
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        """Held by the thread that makes the calls."""
        self._thread: threading.Thread | None = None
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Whether to go on, for the thread: one for each call that was submitted."""
        self._unnamed: Counter[str] = Counter()
        self.optimizers = itertools.count()
        """Numbers for those whose gradients are reduced here."""
        self._waiting = 0
        self._stirred = False
        """Whether there may be something new to tell the others."""
        self._joined: frozenset[int] = frozenset()
        self._last_joined = -1
        self._generation = group.generation

    # -- calls ---------------------------------------------------------------------

    def name(self, operation: str, given: str | None) -> str:
        """What a call is known by: a name of the user's, or its number."""
        if given is not None:
            return f"{operation}.{given}"
        self._unnamed[operation] += 1
        return f"{operation}.noname.{self._unnamed[operation]}"

    def submit(self, request: Request) -> None:
        """Begin a call; return at once.

        Raises:
            UsageError: One of this name is under way.
        """
        self._add(request)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="nbdist horovod", daemon=True
            )
            self._thread.start()
        self._work.put(True)

    def run(self, request: Request) -> None:
        """Make a call, and return when it is done.

        Raises:
            UsageError: One of this name is under way.
            BaseException: What ended it.
        """
        if self._pending or not self._turn.acquire(blocking=False):
            self.submit(request)
            self.wait(request)
            return
        try:  # on this very thread: that saves two changes of threads
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
        """Wait until a call is done.

        Raises:
            BaseException: What ended it.
        """
        if not request.handle.is_completed():
            with self._waits():
                request.handle.wait()
        else:
            request.handle.wait()

    def poll(self, request: Request) -> bool:
        """Whether a call is done. Does not wait."""
        if not request.handle.is_completed():
            self._stir()
        return request.handle.is_completed()

    def join(self) -> int:
        """Stand in for this rank until all have joined.

        Returns:
            The rank within the group that was the last to join.
        """
        kind = signature(JOIN, None, None, None, (), "none")
        self.run(Request(JOIN, kind, self._all_joined_at_once, self.abort))
        return self._last_joined

    def abort(self, error: BaseException) -> None:
        """Release whoever waits for the other ranks. Any thread may call."""
        self.group.abort(error)
        self._stir()

    def close(self) -> None:
        """End all calls, and the thread. Safe to call twice."""
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
        """Give up what is left from before the ranks have met anew."""
        if self._generation != self.group.generation:
            self._generation, self._joined = self.group.generation, frozenset()
            self._fail_all(CollectiveAborted("the ranks have met anew"))

    def _stir(self) -> None:
        with self._changed:
            self._stirred = True
            self._changed.notify_all()

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """This thread makes no call until one is done."""
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
        """Make this rank's oldest call, or all those that the ranks agree on."""
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
        """One call, on all ranks; it is done afterwards, well or not.

        Raises:
            CollectiveMismatch: The ranks have come with different ones. It still waits.
        """
        error: BaseException | None = None
        try:
            self.group.run(
                request.kind, request.body, meets=request.meets, place=request.place
            )
        except CollectiveMismatch:
            raise
        except BaseException as failure:  # noqa: BLE001 - whoever waits for it raises it
            error = failure
        self._finish(request, error)
        if self.group.spent:
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
        """Make the calls that all ranks have, once there are some.

        Every rank of the group is here. What each decides follows from what all told.
        """
        while self._pending and self._generation == self.group.generation:
            try:
                table: list[Offers] = all_gather_object(
                    self._offers(), group=self.group
                )
            except CollectiveMismatch:
                continue  # a rank comes a call later
            except BaseException as failure:  # noqa: BLE001 - whoever waits raises it
                self._fail_all(failure)
                return
            if self._settle(table, mismatch):
                return
            self._await_news()

    def _offers(self) -> Offers:
        with self._changed:
            self._stirred = False
            calls = {
                name: Offer(request.kind, request.meets, request.stand_in)
                for name, request in self._pending.items()
            }
            return Offers(calls, self._waiting > 0, self._unnamed)

    def _settle(self, table: list[Offers], mismatch: CollectiveMismatch | None) -> bool:
        """Act on what the ranks have told. Whether that was all there is to say."""
        joined = frozenset(rank for rank, each in enumerate(table) if each.joined)
        newly = joined - self._joined or joined
        self._joined = joined
        active = [each for rank, each in enumerate(table) if rank not in joined]
        if not active:
            for each in table:  # a rank that had joined has not counted on
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
        except CollectiveMismatch as error:  # one name for two things
            self._finish(request, error)

    def _stand_in(self, name: str, offer: Offer) -> Request:
        """A call of others', with elements that change nothing."""
        assert offer.stand_in is not None
        body = offer.stand_in.body(self.group.transport(offer.stand_in.device))
        return Request(name, offer.kind, body, self.abort, meets=offer.meets)

    def _end_join(self, last: int) -> None:
        self._joined = frozenset()
        self._last_joined = last
        self._finish(self._pending[JOIN])

    def _fail_all(self, error: BaseException) -> None:
        for request in list(self._pending.values()):
            self._finish(request, error)

    def _await_news(self) -> None:
        """Until this rank has made a call since it last told, or waits for one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stirred or self._waiting or self.group.spent
            )
