"""The gradients and parameters that the messages announce.

On one host they lie in shared memory: a server adds the workers' gradients where the
workers wrote them, and a worker copies the parameters from where the server wrote them.
Between hosts they are sent by MPI, after the head of the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from nbdist.collectives import Group, all_gather_object
from nbdist.collectives.sync.shared_segment import Segment, share
from nbdist.training.strategies.flat_buffers import FlatBuffers
from nbdist.training.strategies.parameter_server.shards import Roles

__all__ = ["MessageBodies"]


class MessageBodies:
    """Buffers for the gradients and parameters in messages, on this rank.

    A worker owns its gradients from a server's answer to its next push. The server owns
    them from the push to the answer. A server has several buffers for the parameters of
    its shard, the *slots*; the head of an answer has the slot.

    Args:
        shards: the parameters of each shard, on this rank.
        workers: number of workers.
        segment: memory that all ranks share; None to send the bodies.
    """

    def __init__(
        self,
        shards: Sequence[Sequence[Tensor]],
        workers: int,
        segment: Segment | None = None,
    ) -> None:
        self._shards = [_on_host(shard) for shard in shards]
        self._workers = workers
        self._segment = segment
        self._buffers: dict[tuple[int, int], FlatBuffers] = {}

    @classmethod
    def connect(
        cls, group: Group, roles: Roles, shards: Sequence[Sequence[Tensor]]
    ) -> MessageBodies:
        """Make the buffers. Every rank of the group must call."""
        workers = len(roles.workers)
        size = sum(2 * workers * FlatBuffers.bytes_of(_on_host(s)) for s in shards)
        swap = partial(all_gather_object, group=group)
        segment = share(size, group.rank, group.hosts, swap)
        if segment is not None:
            segment.close_file()
        return cls(shards, workers, segment)

    def gradients(self, shard: int, worker: int) -> FlatBuffers:
        """A worker's gradients of a shard. On a server, those of its last push."""
        return self._at(shard, worker)

    def parameters(self, shard: int, slot: int) -> FlatBuffers:
        """A server's slot, of which there is one for each worker."""
        return self._at(shard, self._workers + slot)

    def received(self, shard: int, slot: int) -> FlatBuffers:
        """The buffers in which a worker finds the parameters of a server's slot."""
        return self.parameters(shard, 0 if self._segment is None else slot)

    def sent(self, buffers: FlatBuffers) -> list[Tensor]:
        """What a message with these buffers sends after its head."""
        return [] if self._segment is not None else buffers.buffers

    def _at(self, shard: int, place: int) -> FlatBuffers:
        """One of a shard's buffers: the workers' gradients, then the slots."""
        key = shard, place
        if key not in self._buffers:
            like = self._shards[shard]
            self._buffers[key] = FlatBuffers(like, self._memory(shard, place))
        return self._buffers[key]

    def _memory(self, shard: int, place: int) -> memoryview | None:
        if self._segment is None:
            return None
        sizes = [FlatBuffers.bytes_of(each) for each in self._shards]
        begin = 2 * self._workers * sum(sizes[:shard]) + place * sizes[shard]
        return memoryview(self._segment.memory)[begin : begin + sizes[shard]]


def _on_host(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Tensors without memory of the parameters' shapes and dtypes, in host memory."""
    return [
        torch.empty((), dtype=each.dtype, device="cpu").expand(each.shape)
        for each in parameters
    ]
