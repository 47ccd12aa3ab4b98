"""The parameters in shards: what this rank has of each, and who has more."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nbdist.collectives import (
    all_gather_object,
    broadcast,
    broadcast_object,
    default_group,
)

from .roles import Roles
from .store import Store
from .update_policy import Report

__all__ = ["Shards"]

SERVED, SNAPSHOT, REPLICA = 2, 1, 0
"""How a rank has a shard. The first comes with the optimizer's state as it is, the
second with that of a while ago, the last with none."""


class Shards:
    """Every shard, as this rank has it: whether it serves it, or trains with it.

    Args:
        tensors: the parameters of each shard, on this rank.
        optimizer: over all of them.
    """

    def __init__(
        self, tensors: Sequence[Sequence[Tensor]], optimizer: Optimizer
    ) -> None:
        self.tensors = tensors
        self.versions = [0] * len(tensors)
        """Of the parameters that this rank has, by shard."""
        self.store: Store | None = None
        """The shard that this rank serves."""
        self.report = Report()
        """What this rank has counted as a server."""
        self._kept: dict[int, tuple[int, bytes]] = {}
        self._optimizer = optimizer

    def keep(self, shard: int, version: int, snapshot: bytes) -> None:
        """Keep a snapshot of a shard, the newest that this rank was given."""
        self._kept[shard] = version, snapshot

    def meet(self, roles: Roles) -> None:
        """Bring all shards to their servers, and all ranks up to date. All must call.

        A shard comes from the server that had it, or else from the newest snapshot.
        """
        rank = default_group().rank
        every = all_gather_object(self._holds(rank - roles.servers.start))
        for shard, server in enumerate(roles.servers):
            self._bring(shard, server, [held[shard] for held in every])
        if rank in roles.workers:
            self.store = None
            self._optimizer.state.clear()

    def _holds(self, own: int) -> list[tuple[int, int]]:
        """How this rank has each shard, and in which version.

        Args:
            own: the shard that it would serve.
        """
        held = []
        for shard, version in enumerate(self.versions):
            if self.store is not None and shard == own:
                held.append((SERVED, self.report.updates))
            elif shard in self._kept:
                held.append((SNAPSHOT, self._kept[shard][0]))
            else:
                held.append((REPLICA, version))
        return held

    def _bring(self, shard: int, server: int, held: Sequence[tuple[int, int]]) -> None:
        """Take a shard from the rank that has it best, to its server and to all."""
        best = max(held)
        source = held.index(best)
        how, version = best
        data = None
        if how == SNAPSHOT:
            data = broadcast_object(self._kept.get(shard, (0, b""))[1], source)
        elif how == REPLICA and version:
            warnings.warn(
                f"the server of shard {shard} is gone and has left no snapshot: its "
                "optimizer state begins anew, its parameters are a worker's",
                RuntimeWarning,
                stacklevel=2,
            )
        if default_group().rank == server and how != SERVED:
            self.store = Store(self.tensors[shard], self._optimizer)
            self.report.updates = version
            if data:
                self.store.restore(data)
        origin = source if how == REPLICA else server
        for parameter in self.tensors[shard]:
            with torch.no_grad():
                broadcast(parameter, origin)
        self.versions[shard] = version

    def __getstate__(self) -> dict[str, Any]:
        # A rank that joins gets a copy of another one's, and serves nothing yet.
        return {**self.__dict__, "store": None, "report": Report()}
