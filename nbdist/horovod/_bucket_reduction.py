"""How a DistributedOptimizer's gradients are reduced: as named calls, like a user's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._allgather import allgather
from ._allreduce import allreduce_
from ._compression import Compressor
from ._coordinator import Coordinator
from ._process_sets import ProcessSet, coordinator_of
from ._reduce_ops import Average, ReduceOp, Sum
from ._reduction import reduction
from ._scaling import Scaling

__all__ = ["BucketReduction"]


class BucketReduction:
    """A `nbdist.training.gradients.Reduction`.

    Args:
        op, predivide: As for `DistributedOptimizer`.
        compression: Applied to whole buckets.
        process_set: The ranks.
    """

    def __init__(
        self,
        op: ReduceOp,
        predivide: float,
        compression: type[Compressor],
        process_set: ProcessSet,
    ) -> None:
        self._op = op
        self._owner: Coordinator | None = None
        self._number = 0
        self._scaling = Scaling(op, 1 / predivide, predivide)
        self._compression = compression
        self._set = process_set

    @property
    def _name(self) -> str:
        """The same on all ranks: optimizers count as they are used first.

        They count anew when the ranks have changed, for one that has joined since has
        made fewer.
        """
        coordinator = coordinator_of(self._set)
        if self._owner is not coordinator:
            self._owner = coordinator
            self._number = next(coordinator.optimizers)
        return f"gradients.{self._number}"

    @property
    def size(self) -> int:
        return self._set.size()

    def agree(self, numbers: Tensor) -> None:
        leads = self._set.rank() == 0
        if not leads:
            numbers[0] = 0
        name = f"{self._name}.order"
        allreduce_(numbers, name=name, op=Sum, process_set=self._set)

    def begin(self, index: int, bucket: Tensor) -> Callable[[], object]:
        coordinator = coordinator_of(self._set)
        packed, context = self._compression.compress(bucket)
        request = reduction(
            coordinator, [packed], self._scaling, "allreduce", f"{self._name}.{index}"
        )
        coordinator.submit(request)

        def wait() -> None:
            coordinator.wait(request)
            if packed is not bucket:
                bucket.copy_(self._compression.decompress(packed, context))

        return wait

    def sparse(self, index: int, gradient: Tensor) -> Tensor:
        own = gradient.coalesce()
        name = f"{self._name}.sparse.{index}"
        # Gathered along the first dimension, which of indices is the second one.
        indices = allgather(own.indices().T.contiguous(), f"{name}.indices", self._set)
        values = allgather(own.values(), f"{name}.values", self._set)
        if self._op is Average:
            values = values / self.size
        return torch.sparse_coo_tensor(indices.T, values, own.shape).coalesce()
