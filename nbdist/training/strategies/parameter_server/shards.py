"""The roles of the ranks, and this rank's copy of each shard."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
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
from nbdist.errors import UsageError
from nbdist.training.strategies.flat_buffers import FlatBuffers
from nbdist.training.strategies.parameter_server.update_policy import Report

__all__ = ["Roles", "ShardStore", "Shards", "shards_by_bytes"]

SERVED, SNAPSHOT, REPLICA = 2, 1, 0
"""The kinds of copies of a shard, best first. A served shard has its current optimizer
state, a snapshot has an older one, and a replica has none."""


@dataclass(frozen=True)
class Roles:
    """The last `n_ps` of the ranks 0 to size-1 are servers, the others workers."""

    size: int
    n_ps: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_ps < self.size:
            raise UsageError(
                f"n_ps={self.n_ps} of {self.size} ranks: expected at least 1 server "
                "and 1 worker; %dist_scale adds ranks"
            )

    @property
    def workers(self) -> range:
        """The ranks of the workers."""
        return range(self.size - self.n_ps)

    @property
    def servers(self) -> range:
        """The ranks of the servers, in the order of the shards."""
        return range(self.size - self.n_ps, self.size)


def shards_by_bytes(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Distribute tensors over shards of about the same number of bytes.

    Each tensor, in order of decreasing size, goes to the shard that is the smallest so
    far. The largest shard has at most 4/3 of the least possible size (Graham, "Bounds
    on Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics, 1969).

    Args:
        sizes: sizes of the tensors, in bytes.
        count: number of shards.

    Returns:
        The indices in `sizes` of each shard's tensors, in ascending order.

    Raises:
        UsageError: there are fewer tensors than shards.
    """
    if count > len(sizes):
        raise UsageError(
            f"n_ps={count}: the optimizer has {len(sizes)} parameters, and each server "
            f"holds at least one whole parameter: pass n_ps={len(sizes)} or less"
        )
    shards: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        least = filled.index(min(filled))
        shards[least].append(place)
        filled[least] += sizes[place]
    return [sorted(shard) for shard in shards]


class ShardStore:
    """A server's shard: the parameters that it holds, and the optimizer over them.

    The user's optimizer has the parameters of all shards. An optimizer skips parameters
    without a gradient, so it makes state for this shard only.

    Args:
        parameters: the parameters of the shard, on this rank.
        optimizer: an optimizer over these and possibly other parameters.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        own = {id(parameter) for parameter in parameters}
        for parameter in list(optimizer.state):
            if id(parameter) not in own:
                del optimizer.state[parameter]

    @torch.no_grad()
    def apply(self, gradients: Sequence[FlatBuffers]) -> None:
        """Take a step with the mean of the given gradients.

        The gradients are added in their order, into the first buffers.
        """
        mean = gradients[0]
        for others in gradients[1:]:
            mean.add(others)
        if len(gradients) > 1:
            mean.scale(1 / len(gradients))
        self._optimizer.zero_grad()
        mean.set_gradients(self._parameters)
        self._optimizer.step()

    def values(self) -> list[Tensor]:
        """The parameters themselves."""
        return self._parameters

    def set_options(self, options: Sequence[dict[str, Any]]) -> None:
        """Set options such as learning rates, from a dict for each parameter group."""
        for group, given in zip(self._optimizer.param_groups, options, strict=True):
            group.update(given)

    def snapshot(self) -> bytes:
        """The parameters and the optimizer's state, as bytes."""
        file = io.BytesIO()
        state = [self._optimizer.state.get(each, {}) for each in self._parameters]
        values = [parameter.detach() for parameter in self._parameters]
        torch.save({"values": values, "state": state}, file)
        return file.getvalue()

    @torch.no_grad()
    def restore(self, snapshot: bytes) -> None:
        """Load what `snapshot` has returned, on this rank or another one."""
        saved = torch.load(io.BytesIO(snapshot), map_location="cpu")
        for parameter, value, state in zip(
            self._parameters, saved["values"], saved["state"], strict=True
        ):
            parameter.copy_(value)
            self._optimizer.state[parameter] = {
                name: _to_device_of(parameter, name, entry)
                for name, entry in state.items()
            }


class Shards:
    """This rank's copy of each shard.

    Args:
        tensors: the parameters of each shard, on this rank.
        optimizer: an optimizer over the parameters of all shards.
    """

    def __init__(
        self, tensors: Sequence[Sequence[Tensor]], optimizer: Optimizer
    ) -> None:
        self.tensors = tensors
        self.versions = [0] * len(tensors)
        """The version of this rank's copy of each shard."""
        self.store: ShardStore | None = None
        """The shard that this rank serves; None on a worker."""
        self.report = Report()
        """The counts of this rank as a server."""
        self._kept: dict[int, tuple[int, bytes]] = {}
        self._optimizer = optimizer

    def keep(self, shard: int, version: int, snapshot: bytes) -> None:
        """Keep a snapshot of a shard. It replaces an older one."""
        self._kept[shard] = version, snapshot

    def assign(self, roles: Roles) -> None:
        """Give each shard to its server, and its parameters to all ranks.

        Every rank must call. The source of a shard is the server that holds it. If that
        server has died, it is the newest snapshot, and without a snapshot a worker.
        """
        rank = default_group().rank
        every = all_gather_object(self._holds(rank - roles.servers.start))
        for shard, server in enumerate(roles.servers):
            self._assign_shard(shard, server, [held[shard] for held in every])
        if rank in roles.workers:
            self.store = None
            self._optimizer.state.clear()

    def _holds(self, own: int) -> list[tuple[int, int]]:
        """The kind and version of this rank's copy of each shard.

        Args:
            own: index of the shard that this rank serves; negative on a worker.
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

    def _assign_shard(
        self, shard: int, server: int, held: Sequence[tuple[int, int]]
    ) -> None:
        """Copy a shard from the rank with the best copy to its server and to all ranks.

        Args:
            held: the kind and version of each rank's copy, in rank order.
        """
        best = max(held)
        source = held.index(best)
        how, version = best
        data = None
        if how == SNAPSHOT:
            data = broadcast_object(self._kept.get(shard, (0, b""))[1], source)
        elif how == REPLICA and version:
            warnings.warn(
                f"the server of shard {shard} has died and no snapshot of the shard "
                "exists: its parameters are copied from a worker, and its optimizer "
                "state starts empty. A lower snapshot_every loses fewer updates",
                RuntimeWarning,
                stacklevel=2,
            )
        if default_group().rank == server and how != SERVED:
            self.store = ShardStore(self.tensors[shard], self._optimizer)
            self.report.updates = version
            if data:
                self.store.restore(data)
        origin = source if how == REPLICA else server
        for parameter in self.tensors[shard]:
            with torch.no_grad():
                broadcast(parameter, origin)
        self.versions[shard] = version

    def __getstate__(self) -> dict[str, Any]:
        # A rank that joins gets a copy of this object. It serves no shard yet.
        return {**self.__dict__, "store": None, "report": Report()}


def _to_device_of(parameter: Tensor, name: str, entry: Any) -> Any:
    """Move optimizer state to its parameter's device; step counts stay on the CPU."""
    if isinstance(entry, Tensor) and name != "step":
        return entry.to(parameter.device)
    return entry
