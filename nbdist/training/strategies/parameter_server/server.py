"""The server applies gradients, and answers with parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import TolerantMessages
from nbdist.errors import CollectiveAborted
from nbdist.ipc.interrupts import defer_interrupts
from nbdist.training.strategies.flat_buffers import FlatBuffers
from nbdist.training.strategies.parameter_server.message_bodies import MessageBodies
from nbdist.training.strategies.parameter_server.messages import (
    Head,
    Kind,
    Receiver,
    packed,
    send,
    unpacked,
)
from nbdist.training.strategies.parameter_server.shards import ShardStore
from nbdist.training.strategies.parameter_server.update_policy import (
    Decision,
    UpdatePolicy,
)

__all__ = ["REDUCTIONS", "Server", "combine"]

REDUCTIONS = ("sum", "mean", "min", "max")


class _Channel:
    """A server's messages from and to one worker."""

    def __init__(self, messages: TolerantMessages, worker: int) -> None:
        self.worker = worker
        self.receiving = Receiver(messages, worker)
        self.head: Head | None = None
        """The head of the message whose bodies are awaited; None while a head is
        awaited."""
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.numbers = torch.empty(0, dtype=torch.float64, device="cpu")
        self.is_open = True
        """Whether the worker may send more."""
        self.slot: int | None = None
        """The slot that the worker may still read, until its next message."""
        self.staleness = 0
        """The staleness of the worker's last gradient."""

    def tensors_for(self, head: Head, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors to receive the bodies into that a head announces.

        Args:
            gradients: what is received of the bodies of a push.
        """
        if head.kind is Kind.PUSH:
            return gradients
        if head.kind is Kind.REDUCE:
            self.numbers = torch.empty(head.size, dtype=torch.float64, device="cpu")
            return [self.numbers]
        self.bytes = torch.empty(head.size, dtype=torch.uint8, device="cpu")
        return [self.bytes]


class Server:
    """Applies the workers' gradients as the update policy says.

    Args:
        messages: messages to the workers.
        bodies: the gradients and parameters in the messages.
        shard: number of the shard.
        workers: ranks of the workers, which are also their numbers.
        store: the shard that this server holds.
        policy: decides what to do with each gradient.
        snapshot_every: updates between two snapshots; None for no snapshots. A worker
            keeps the snapshot.
    """

    def __init__(
        self,
        messages: TolerantMessages,
        bodies: MessageBodies,
        shard: int,
        workers: Sequence[int],
        store: ShardStore,
        policy: UpdatePolicy,
        snapshot_every: int | None,
    ) -> None:
        self._messages, self._store, self._policy = messages, store, policy
        self._bodies, self._shard = bodies, shard
        self._filled: tuple[int, int] | None = None  # a slot, and its version
        self._snapshot_every = snapshot_every
        self._snapshot_at = policy.version + 1
        self._channels = {worker: _Channel(messages, worker) for worker in workers}
        self._done: dict[int, Tensor] = {}
        self._numbers: dict[int, Tensor] = {}
        self._reduction = 0
        self._why = "none has begun"
        policy.begin(workers)

    def serve(self) -> Any:
        """Serve until every worker has finished, failed or died.

        Returns:
            The result of the lowest worker that has finished.

        Raises:
            CollectiveAborted: no worker has finished.
        """
        self._messages.wait(
            self._handle_all,
            what="parameter server",
            awaited=lambda: self._policy.active,
            moving=lambda: any(channel.head for channel in self._channels.values()),
        )
        if not self._done:
            raise CollectiveAborted(f"no worker has finished: {self._why}")
        self._confirm_end()
        return unpacked(self._done[min(self._done)])

    def _handle_all(self) -> bool:
        """Handle all messages that have arrived; return whether no worker is left."""
        channels = [channel for channel in self._channels.values() if channel.is_open]
        while any([self._handle_next(each) for each in channels if each.is_open]):  # noqa: C419
            pass
        return not self._policy.active

    def _handle_next(self, channel: _Channel) -> bool:
        """Handle a worker's next message or its death; return whether there was one."""
        if channel.worker in self._messages.lost:
            self._remove(channel, self._messages.lost[channel.worker])
            return True
        if not channel.receiving.arrived:
            return False
        if channel.receiving.error is not None:
            self._remove(channel, str(channel.receiving.error))
            return True
        if channel.head is None:
            channel.head, channel.slot = channel.receiving.head, None
            gradients = self._bodies.sent(self._gradients(channel.worker))
            channel.receiving.receive(channel.tensors_for(channel.head, gradients))
            return True
        head, channel.head = channel.head, None
        self._handle(channel, head)
        if channel.is_open:
            channel.receiving.receive_head()
        return True

    def _handle(self, channel: _Channel, head: Head) -> None:
        worker = channel.worker
        if head.kind is Kind.PUSH:
            channel.staleness = self._policy.version - head.version
            with defer_interrupts():  # an interrupt must not divide an update
                self._carry_out(self._policy.push(worker, head.version))
        elif head.kind is Kind.OPTIONS:
            self._store.set_options(unpacked(channel.bytes))
        elif head.kind is Kind.REDUCE:
            self._numbers[worker] = channel.numbers
            self._reduction = head.detail
            self._reduce_if_due()
        elif head.kind is Kind.DONE:
            self._done[worker] = channel.bytes
            self._end(channel)
        else:
            self._remove(channel, f"rank {worker} has failed")

    def _remove(self, channel: _Channel, why: str) -> None:
        self._why = why
        self._end(channel)

    def _end(self, channel: _Channel) -> None:
        """Close the channel. The other workers continue without this worker."""
        channel.is_open, channel.head, channel.slot = False, None, None
        with defer_interrupts():
            self._carry_out(self._policy.leave(channel.worker))
        self._reduce_if_due()

    # -- answers -------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> None:
        if decision.apply:
            self._store.apply([self._gradients(worker) for worker in decision.apply])
        for worker in decision.answer:
            if self._channels[worker].is_open:
                self._answer(worker, Kind.PUSH, self._snapshot_if_due())

    def _answer(self, worker: int, kind: Kind, extra: Tensor) -> None:
        """Send a worker the current parameters, and extra bytes."""
        channel = self._channels[worker]
        slot = channel.slot = self._current_slot()
        version = self._policy.version
        head = Head(kind, version, len(extra), slot, channel.staleness)
        parameters = self._bodies.parameters(self._shard, slot)
        send(self._messages, worker, head, [*self._bodies.sent(parameters), extra])

    def _current_slot(self) -> int:
        """A slot with the current parameters. It is filled once for each version."""
        version = self._policy.version
        if self._filled is None or self._filled[1] != version:
            read = {channel.slot for channel in self._channels.values()}
            slot = min(set(range(len(self._channels))) - read)
            self._bodies.parameters(self._shard, slot).fill(self._store.values())
            self._filled = slot, version
        return self._filled[0]

    def _gradients(self, worker: int) -> FlatBuffers:
        return self._bodies.gradients(self._shard, worker)

    def _snapshot_if_due(self) -> Tensor:
        """A snapshot for a worker to keep; empty if none is due."""
        every, version = self._snapshot_every, self._policy.version
        if every is None or version < self._snapshot_at:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        self._snapshot_at = version + every
        return torch.frombuffer(bytearray(self._store.snapshot()), dtype=torch.uint8)

    def _reduce_if_due(self) -> None:
        """Answer a reduction if every active worker has sent its numbers."""
        if not self._numbers or self._policy.active - self._numbers.keys():
            return
        given, self._numbers = self._numbers, {}
        numbers = [given[worker] for worker in sorted(given)]
        result = combine(REDUCTIONS[self._reduction], numbers)
        for worker in given:
            if self._channels[worker].is_open:
                send(self._messages, worker, Head(Kind.REDUCE), [result])

    def _confirm_end(self) -> None:
        """Answer the workers that have finished, and wait for their confirmations."""
        report = packed(self._policy.report)
        leaving = [self._channels[worker] for worker in self._done]
        for channel in leaving:
            self._answer(channel.worker, Kind.DONE, report)
            channel.receiving.receive_head()

        def waiting() -> list[int]:
            return [
                channel.worker
                for channel in leaving
                if channel.worker not in self._messages.lost
                and not channel.receiving.arrived
            ]

        self._messages.wait(
            lambda: not waiting(), what="parameter server", awaited=waiting
        )


def combine(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """Reduce tensors of equal shape, in their order."""
    stacked = torch.stack(list(tensors))
    if op in ("sum", "mean"):
        return stacked.sum(0) / (len(tensors) if op == "mean" else 1)
    return stacked.amin(0) if op == "min" else stacked.amax(0)
