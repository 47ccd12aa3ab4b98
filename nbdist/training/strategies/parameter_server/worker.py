"""The worker pushes gradients to the servers, and pulls parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import TolerantMessages
from nbdist.errors import CollectiveAborted
from nbdist.telemetry import internal_metrics
from nbdist.training.strategies.parameter_server.message_bodies import MessageBodies
from nbdist.training.strategies.parameter_server.messages import (
    Head,
    Kind,
    Receiver,
    packed,
    send,
    unpacked,
)
from nbdist.training.strategies.parameter_server.update_policy import Report

__all__ = ["Worker"]


class Worker:
    """A worker's messages to and from all servers.

    Args:
        messages: messages to the servers.
        bodies: the gradients and parameters in the messages.
        worker: number of this worker.
        servers: ranks of the servers.
        shards: for each server, this worker's parameters that the server holds.
        versions: for each server, the version of these parameters.
        keep: called as `keep(server, version, snapshot)` with each snapshot that a
            server sends.
    """

    def __init__(
        self,
        messages: TolerantMessages,
        bodies: MessageBodies,
        worker: int,
        servers: Sequence[int],
        shards: Sequence[Sequence[Tensor]],
        versions: Sequence[int],
        keep: Callable[[int, int, bytes], None],
    ) -> None:
        self._messages = messages
        self._servers = servers
        self._shards = shards
        self._bodies = bodies
        self._gradients = [
            bodies.gradients(number, worker) for number in range(len(shards))
        ]
        self.versions = list(versions)
        self._keep = keep
        self._options: Any = None

    def push(self, options: Sequence[dict[str, Any]]) -> None:
        """Send this worker's gradients, and replace its parameters by the answers.

        Args:
            options: the options of each parameter group. They are sent if they have
                changed.
        """
        if options != self._options:
            self._options = [dict(each) for each in options]
            data = packed(self._options)
            self._send_all(Head(Kind.OPTIONS, size=len(data)), [data])
        for number, (server, shard) in enumerate(
            zip(self._servers, self._shards, strict=True)
        ):
            gradients = self._gradients[number]
            gradients.fill([parameter.grad for parameter in shard])
            head = Head(Kind.PUSH, self.versions[number])
            send(self._messages, server, head, self._bodies.sent(gradients))
        answers = self._answers(range(len(self._servers)))
        for number, (head, extra) in answers.items():
            self._take_parameters(number, head)
            if len(extra):
                self._keep(number, head.version, extra.numpy().tobytes())
        stalest = max(head.staleness for head, _ in answers.values())
        internal_metrics.record(staleness=stalest)

    def reduce(self, op: int, numbers: Tensor) -> Tensor:
        """Reduce float64 numbers over the workers, on the first server.

        Args:
            op: index in the server's `REDUCTIONS`.
        """
        head = Head(Kind.REDUCE, size=len(numbers), detail=op)
        send(self._messages, self._servers[0], head, [numbers])
        result = torch.empty_like(numbers)
        self._answers([0], lambda _number, _head: [result])
        return result

    def finish(self, result: Any) -> list[Report]:
        """Report that this worker has finished, and wait for the other workers.

        Args:
            result: the worker's result, which must be picklable. The servers return the
                result of the lowest worker.

        Returns:
            The report of each server.
        """
        data = packed(result)
        self._send_all(Head(Kind.DONE, size=len(data)), [data])
        answers = self._answers(range(len(self._servers)))
        for number, (head, _) in answers.items():
            self._take_parameters(number, head)
        self._send_all(Head(Kind.BYE), [])
        return [unpacked(answers[number][1]) for number in sorted(answers)]

    def leave(self) -> None:
        """Report that this worker has failed."""
        if not self._messages.broken:
            self._send_all(Head(Kind.LEFT), [])

    def _send_all(self, head: Head, bodies: Sequence[Tensor]) -> None:
        for server in self._servers:
            if server not in self._messages.lost:
                send(self._messages, server, head, bodies)

    def _take_parameters(self, number: int, head: Head) -> None:
        self._bodies.received(number, head.detail).copy_to(self._shards[number])
        self.versions[number] = head.version

    def _answers(
        self,
        numbers: Sequence[int],
        tensors_for: Callable[[int, Head], Sequence[Tensor]] | None = None,
    ) -> dict[int, tuple[Head, Tensor]]:
        """Wait for an answer from each of these servers.

        Args:
            numbers: indices of the servers.
            tensors_for: the tensors that receive an answer's bodies. Default: the
                parameters, and the extra bytes.

        Returns:
            The head and the extra bytes of each answer, by server.
        """
        open_ = {
            number: Receiver(self._messages, self._servers[number])
            for number in numbers
        }
        answers: dict[int, tuple[Head, Tensor]] = {}

        def tensors_of(number: int, head: Head) -> Sequence[Tensor]:
            extra = torch.empty(head.size, dtype=torch.uint8, device="cpu")
            answers[number] = head, extra
            if tensors_for is not None:
                return tensors_for(number, head)
            parameters = self._bodies.received(number, head.detail)
            return [*self._bodies.sent(parameters), extra]

        def look() -> bool:
            for number, receiving in list(open_.items()):
                # Read once in each call: a later arrival is handled in the next call.
                arrived = receiving.arrived
                self._check(self._servers[number], receiving)
                if arrived and number not in answers:
                    receiving.receive(tensors_of(number, receiving.head))
                    arrived = receiving.is_empty
                if arrived:
                    del open_[number]
                elif number in answers:  # a long message moves while both ends poll
                    self._messages.ring(self._servers[number])
            return not open_

        self._messages.wait(
            look,
            what="parameter server",
            awaited=lambda: [self._servers[number] for number in open_],
        )
        return answers

    def _check(self, server: int, receiving: Receiver) -> None:
        why = self._messages.lost.get(server)
        if why is None and receiving.arrived and receiving.error is not None:
            why = str(receiving.error)
        if why is not None:
            raise CollectiveAborted(f"released from parameter server {server}: {why}")
