"""A worker's end: it pushes gradients, and gets parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import Post
from nbdist.errors import CollectiveAborted

from .messages import Head, Kind, Receiving, packed, send, unpacked
from .store import on_host
from .update_policy import Report

__all__ = ["Worker"]


class Worker:
    """One worker's dealings with all servers.

    Args:
        post: to the servers.
        servers: their ranks.
        shards: the replica's parameters that each server holds.
        versions: of the parameters that the replica has, by server.
        keep: is given the snapshots that servers send: server, version, bytes.
    """

    def __init__(
        self,
        post: Post,
        servers: Sequence[int],
        shards: Sequence[Sequence[Tensor]],
        versions: Sequence[int],
        keep: Callable[[int, int, bytes], None],
    ) -> None:
        self._post = post
        self._servers = servers
        self._shards = shards
        self._gradients = [on_host(shard) for shard in shards]
        self._values = [on_host(shard) for shard in shards]
        self.versions = list(versions)
        self._keep = keep
        self._options: Any = None

    def push(self, options: Sequence[dict[str, Any]]) -> None:
        """Send the replica's gradients, and replace its parameters by the answer.

        Args:
            options: each parameter group's; sent on when they have changed.
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
            send(self._post, server, head, gradients.buffers)
        for number, (head, extra) in self._answers(range(len(self._servers))).items():
            self._take(number, head)
            if len(extra):
                self._keep(number, head.version, extra.numpy().tobytes())

    def reduce(self, op: int, numbers: Tensor) -> Tensor:
        """Reduce float64 numbers over the workers, by way of the first server."""
        head = Head(Kind.REDUCE, size=len(numbers), detail=op)
        send(self._post, self._servers[0], head, [numbers])
        result = torch.empty_like(numbers)
        self._answers([0], lambda _number, _head: [result])
        return result

    def finish(self, result: Any) -> list[Report]:
        """Say that this worker is done, and wait for the others.

        Args:
            result: picklable; what the servers return too.

        Returns:
            What each server has counted.
        """
        data = packed(result)
        self._send_all(Head(Kind.DONE, size=len(data)), [data])
        answers = self._answers(range(len(self._servers)))
        for number, (head, _) in answers.items():
            self._take(number, head)
        self._send_all(Head(Kind.BYE), [])
        return [unpacked(answers[number][1]) for number in sorted(answers)]

    def leave(self) -> None:
        """Say that this worker has failed."""
        if not self._post.broken:
            self._send_all(Head(Kind.LEFT), [])

    def _send_all(self, head: Head, bodies: Sequence[Tensor]) -> None:
        for server in self._servers:
            if server not in self._post.lost:
                send(self._post, server, head, bodies)

    def _take(self, number: int, head: Head) -> None:
        self._values[number].spill(self._shards[number])
        self.versions[number] = head.version

    def _answers(
        self,
        numbers: Sequence[int],
        room_for: Callable[[int, Head], Sequence[Tensor]] | None = None,
    ) -> dict[int, tuple[Head, Tensor]]:
        """Wait for an answer of each of these servers: parameters, and some bytes."""
        open_ = {
            number: Receiving(self._post, self._servers[number]) for number in numbers
        }
        answers: dict[int, tuple[Head, Tensor]] = {}

        def rooms(number: int, head: Head) -> Sequence[Tensor]:
            extra = torch.empty(head.size, dtype=torch.uint8, device="cpu")
            answers[number] = head, extra
            if room_for is not None:
                return room_for(number, head)
            return [*self._values[number].buffers, extra]

        def look() -> bool:
            for number, receiving in list(open_.items()):
                # Looked at once a turn: what arrives meanwhile is the next turn's.
                arrived = receiving.arrived
                self._check(self._servers[number], receiving)
                if arrived and number in answers:
                    del open_[number]
                elif arrived:
                    receiving.ask_for(rooms(number, receiving.head))
                elif number in answers:  # a long message moves while both look
                    self._post.ring(self._servers[number])
            return not open_

        self._post.wait(
            look,
            what="parameter server",
            awaited=lambda: [self._servers[number] for number in open_],
        )
        return answers

    def _check(self, server: int, receiving: Receiving) -> None:
        why = self._post.lost.get(server)
        if why is None and receiving.arrived and receiving.error is not None:
            why = str(receiving.error)
        if why is not None:
            raise CollectiveAborted(f"released from parameter server {server}: {why}")
