"""Collectives on device tensors through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.copy_pipeline import Move, Piece, Pipeline

__all__ = ["StagedTransport"]


class StagedTransport(Transport):
    """Copies tensors to the host, calls a host transport, and copies the results back.

    All ranks cut their tensors into the same pieces. Each piece is one call of the host
    transport on all ranks.
    """

    description: ClassVar[str] = "staged through host memory"

    def __init__(
        self, host: Transport, pipeline: Pipeline, piece: int, rank: int, size: int
    ) -> None:
        """Use a host transport for device tensors.

        Args:
            host: the transport for CPU tensors.
            pipeline: the pipeline, which runs one transfer at a time. Transports may
                share it.
            piece: bytes of each rank's data in one call of `host`.
            rank: this process's rank in the group.
            size: number of ranks in the group.
        """
        self._host, self._pipeline = host, pipeline
        self._piece = piece
        self._rank, self._size = rank, size
        self.has_barrier = host.has_barrier  # type: ignore[misc]

    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
            self._host.all_reduce(to_host[0], op)

        cut = self._cut(tensor)
        self._pipeline.run([Piece([each], [each], move, True) for each in cut])

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
            self._host.reduce(to_host[0], op, root)

        wanted = slice(self._rank == root)  # only the root's tensor changes
        cut = [[each] for each in self._cut(tensor)]
        self._pipeline.run([Piece(each, each[wanted], move, True) for each in cut])

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
            self._host.reduce_scatter(from_host[0], to_host, op)

        self._run(move, self._cut_all(inputs), self._cut_all([output]))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
            self._host.broadcast((to_host or from_host)[0], root)

        cut = [[each] for each in self._cut(tensor)]
        none: list[list[Tensor]] = [[] for _ in cut]
        pair = (cut, none) if self._rank == root else (none, cut)
        self._run(move, *pair)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
            self._host.all_gather(from_host, to_host[0])

        self._run(move, self._cut_all([tensor]), self._cut_all(outputs))

    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
            self._host.gather(from_host or None, to_host[0], root)

        to_host = self._cut_all([tensor])
        self._run(move, to_host, self._cut_all(outputs or (), len(to_host)))

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
            self._host.scatter(from_host[0], to_host or None, root)

        from_host = self._cut_all([tensor])
        self._run(move, self._cut_all(inputs or (), len(from_host)), from_host)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        room = self._room(outputs[0].dtype, self._size)
        lengths = [min(room, longest - at) for at in range(0, longest, room)] or [0]

        def moving(longest_here: int) -> Piece:
            def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
                self._host.all_to_all(from_host, to_host, longest_here)

            return Piece(next(to_host), next(from_host), move)

        to_host = iter(self._cut_all(inputs, len(lengths)))
        from_host = iter(self._cut_all(outputs, len(lengths)))
        self._pipeline.run([moving(length) for length in lengths])

    def close(self) -> None:
        self._pipeline.close()  # the group closes the host transport

    def _run(
        self,
        move: Move,
        to_host: Sequence[Sequence[Tensor]],
        from_host: Sequence[Sequence[Tensor]],
    ) -> None:
        pairs = zip(to_host, from_host, strict=True)
        self._pipeline.run([Piece(*pair, move) for pair in pairs])

    def _room(self, dtype: torch.dtype, parts: int) -> int:
        return max(self._piece // parts // dtype.itemsize, 1)

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut a tensor. An empty tensor has one piece, so that ranks synchronize."""
        pieces: Sequence[Tensor] = tensor.split(self._room(tensor.dtype, 1))
        return pieces

    def _cut_all(
        self, tensors: Sequence[Tensor], count: int | None = None
    ) -> list[list[Tensor]]:
        """Cut a list of tensors; for each piece, the part of each tensor.

        Args:
            tensors: of one dtype, and of one length unless `count` is given.
            count: the number of pieces.
        """
        if not tensors:
            return [[] for _ in range(count or 0)]
        room = self._room(tensors[0].dtype, self._size)
        if count is None:
            count = max(-(-len(tensors[0]) // room), 1)
        return [
            [each[at * room : (at + 1) * room] for each in tensors]
            for at in range(count)
        ]
