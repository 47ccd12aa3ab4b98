"""Reduces the gradients of a DistributedOptimizer by named calls."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nbdist.horovod.compression import Compressor
from nbdist.horovod.coordinator import Coordinator
from nbdist.horovod.ops.allreduce import allreduce_, reduction
from nbdist.horovod.ops.sparse_allreduce import sparse_allreduce_async
from nbdist.horovod.process_sets import ProcessSet, coordinator_of
from nbdist.horovod.reduce_ops import ReduceOp, Scaling, Sum
from nbdist.training import lasting

__all__ = ["NamedReduction"]


class NamedReduction:
    """Reduces buckets of gradients by named calls. Every rank makes the same calls.

    Args:
        op, predivide: As for `DistributedOptimizer`.
        compression: Compresses each bucket.
        process_set: The ranks that take part.
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
        lasting.register(self)

    def _begin_again(self) -> None:
        self._owner = None  # the ranks number their optimizers again

    @property
    def _name(self) -> str:
        """A name that is equal on all ranks.

        Optimizers are numbered in the order of their first use. The numbers start again
        when the ranks have changed or begin again, because a rank may have used fewer
        optimizers.
        """
        coordinator = coordinator_of(self._set)
        if self._owner is not coordinator:
            self._owner = coordinator
            self._number = coordinator.number_optimizer()
        return f"gradients.{self._number}"

    @property
    def size(self) -> int:
        """The number of ranks that reduce with this one, which is counted.

        With one rank nothing is reduced. A rank outside of the set is alone.
        """
        return self._set.size() if self._set.included() else 1

    def agree(self, numbers: Tensor) -> None:
        """Sum a table of small integers over the ranks, in place.

        The first row of the result is the first rank's.
        """
        leads = self._set.rank() == 0
        if not leads:
            numbers[0] = 0
        name = f"{self._name}.order"
        allreduce_(numbers, name=name, op=Sum, process_set=self._set)

    def begin(self, index: int, bucket: Tensor) -> Callable[[], object]:
        """Begin to reduce a flat bucket in place.

        Returns:
            A function that waits for the reduction.
        """
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
        """Return the reduction of a sparse gradient."""
        name = f"{self._name}.sparse.{index}"
        return sparse_allreduce_async(gradient, name, self._op, self._set)()
