"""What a rank that serves does while the workers train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import Post
from nbdist.errors import CollectiveAborted
from nbdist.telemetry.internal_metrics import note
from nbdist.training._uncut import uncut

from .messages import Head, Kind, Receiving, packed, send, unpacked
from .store import Store, on_host
from .update_policy import Decision, Ledger

__all__ = ["REDUCTIONS", "Server", "combine"]

REDUCTIONS = ("sum", "mean", "min", "max")


class _Desk:
    """One worker, as a server sees it."""

    def __init__(self, post: Post, worker: int, store: Store) -> None:
        self.worker = worker
        self.receiving = Receiving(post, worker)
        self.head: Head | None = None
        """Whose bodies are awaited; None while the next head is."""
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.numbers = torch.empty(0, dtype=torch.float64, device="cpu")
        self.gradients = on_host(store.values())
        self.values = on_host(store.values())
        self.here = True
        """Whether more may come from it."""

    def room_for(self, head: Head) -> Sequence[Tensor]:
        """Where the bodies that a head announces go."""
        if head.kind is Kind.PUSH:
            return self.gradients.buffers
        if head.kind is Kind.REDUCE:
            self.numbers = torch.empty(head.size, dtype=torch.float64, device="cpu")
            return [self.numbers]
        self.bytes = torch.empty(head.size, dtype=torch.uint8, device="cpu")
        return [self.bytes]


class Server:
    """Takes gradients, keeps the ledger's rules, and answers with parameters.

    Args:
        post: to the workers.
        workers: their ranks.
        store: the shard.
        ledger: what to do with each gradient.
        snapshot_every: updates between two snapshots that a worker is given to keep;
            None for none.
    """

    def __init__(
        self,
        post: Post,
        workers: Sequence[int],
        store: Store,
        ledger: Ledger,
        snapshot_every: int | None,
    ) -> None:
        self._post, self._store, self._ledger = post, store, ledger
        self._snapshot_every = snapshot_every
        self._snapshot_at = ledger.version + 1
        self._desks = {worker: _Desk(post, worker, store) for worker in workers}
        self._done: dict[int, Tensor] = {}
        self._numbers: dict[int, Tensor] = {}
        self._reduction = 0
        self._why = "none has begun"
        ledger.begin(workers)

    def serve(self) -> Any:
        """Serve until every worker has finished, failed or died.

        Returns:
            The result of the lowest worker that has finished.

        Raises:
            CollectiveAborted: none has finished.
        """
        self._post.wait(
            self._look,
            what="parameter server",
            awaited=lambda: self._ledger.active,
            moving=lambda: any(desk.head for desk in self._desks.values()),
        )
        if not self._done:
            raise CollectiveAborted(f"no worker has finished: {self._why}")
        self._say_goodbye()
        return unpacked(self._done[min(self._done)])

    def _look(self) -> bool:
        """Do all that can be done now; whether there is no worker left."""
        desks = [desk for desk in self._desks.values() if desk.here]
        while any([self._attend(desk) for desk in desks if desk.here]):  # noqa: C419
            pass
        return not self._ledger.active

    def _attend(self, desk: _Desk) -> bool:
        """Whether there was something from this worker."""
        if desk.worker in self._post.lost:
            self._lose(desk, self._post.lost[desk.worker])
            return True
        if not desk.receiving.arrived:
            return False
        if desk.receiving.error is not None:
            self._lose(desk, str(desk.receiving.error))
            return True
        if desk.head is None:
            desk.head = desk.receiving.head
            desk.receiving.ask_for(desk.room_for(desk.head))
            return True
        head, desk.head = desk.head, None
        self._handle(desk, head)
        if desk.here:
            desk.receiving.ask_for_head()
        return True

    def _handle(self, desk: _Desk, head: Head) -> None:
        worker = desk.worker
        if head.kind is Kind.PUSH:
            note(staleness=self._ledger.version - head.version)
            with uncut():  # an update is whole and counted, or neither
                self._carry_out(self._ledger.push(worker, head.version))
        elif head.kind is Kind.OPTIONS:
            self._store.set_options(unpacked(desk.bytes))
        elif head.kind is Kind.REDUCE:
            self._numbers[worker] = desk.numbers
            self._reduction = head.detail
            self._reduce_if_due()
        elif head.kind is Kind.DONE:
            self._done[worker] = desk.bytes
            self._end(desk)
        else:
            self._lose(desk, f"rank {worker} has failed")

    def _lose(self, desk: _Desk, why: str) -> None:
        self._why = why
        self._end(desk)

    def _end(self, desk: _Desk) -> None:
        """Nothing more comes from this worker: the others go on without it."""
        desk.here, desk.head = False, None
        with uncut():
            self._carry_out(self._ledger.leave(desk.worker))
        self._reduce_if_due()

    # -- answers -------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> None:
        if decision.apply:
            self._store.apply([self._desks[w].gradients for w in decision.apply])
        for worker in decision.answer:
            if self._desks[worker].here:
                self._answer(worker, Kind.PUSH, self._snapshot_if_due())

    def _answer(self, worker: int, kind: Kind, extra: Tensor) -> None:
        """Send the parameters as they are now, and some bytes."""
        desk = self._desks[worker]
        desk.values.fill(self._store.values())
        head = Head(kind, self._ledger.version, size=len(extra))
        send(self._post, worker, head, [*desk.values.buffers, extra])

    def _snapshot_if_due(self) -> Tensor:
        """A snapshot for a worker to keep; mostly none."""
        every, version = self._snapshot_every, self._ledger.version
        if every is None or version < self._snapshot_at:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        self._snapshot_at = version + every
        return torch.frombuffer(bytearray(self._store.snapshot()), dtype=torch.uint8)

    def _reduce_if_due(self) -> None:
        """Answer all who wait for a reduction, once nobody is missing."""
        if not self._numbers or self._ledger.active - self._numbers.keys():
            return
        given, self._numbers = self._numbers, {}
        numbers = [given[worker] for worker in sorted(given)]
        result = combine(REDUCTIONS[self._reduction], numbers)
        for worker in given:
            if self._desks[worker].here:
                send(self._post, worker, Head(Kind.REDUCE), [result])

    def _say_goodbye(self) -> None:
        """Answer all who have finished, and stay until they have got it."""
        report = packed(self._ledger.report)
        leaving = [self._desks[worker] for worker in self._done]
        for desk in leaving:
            self._answer(desk.worker, Kind.DONE, report)
            desk.receiving.ask_for_head()

        def waiting() -> list[int]:
            return [
                desk.worker
                for desk in leaving
                if desk.worker not in self._post.lost and not desk.receiving.arrived
            ]

        self._post.wait(lambda: not waiting(), what="parameter server", awaited=waiting)


def combine(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """Reduce tensors of one shape, in the order given."""
    stacked = torch.stack(list(tensors))
    if op in ("sum", "mean"):
        return stacked.sum(0) / (len(tensors) if op == "mean" else 1)
    return stacked.amin(0) if op == "min" else stacked.amax(0)
