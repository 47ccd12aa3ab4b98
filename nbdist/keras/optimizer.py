"""DistributedOptimizer: a Keras optimizer that applies the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from nbdist.errors import UsageError
from nbdist.horovod.compression import Compression, Compressor
from nbdist.horovod.ops.allreduce import grouped_allreduce
from nbdist.horovod.process_sets import ProcessSet, global_process_set
from nbdist.horovod.reduce_ops import Average, ReduceOp, Sum
from nbdist.keras.variables import check_backend, tensors_of

__all__ = ["DistributedOptimizer"]

Optimizer = TypeVar("Optimizer")


def DistributedOptimizer(
    optimizer: Optimizer,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> Optimizer:
    """Make an optimizer that applies the gradients of all ranks.

    Every rank must train, with the same number of steps.

    The class of the result is a subclass of the given optimizer's class. The result has
    the same options and state. The gradients of a step are reduced together, as one
    tensor for each dtype, before clipping, weight decay and accumulation. A variable
    without a gradient counts as zero. A model saved with this optimizer can be loaded
    with the given optimizer's class.

    Args:
        optimizer: A `keras.optimizers.Optimizer`.
        compression: Compresses the gradients before they are sent.
        op: Average or Sum.
        process_set: The ranks that take part. Default: all ranks.

    Raises:
        UsageError: Keras does not use its torch backend, or `op` is another one.
    """
    check_backend()
    if op not in (Average, Sum):
        raise UsageError(f"op={op}: expected hvd.Average or hvd.Sum")
    base: Any = type(optimizer)
    if hasattr(base, "_nbdist_base"):
        base = base._nbdist_base  # wrapped before, as in a cell that is run again

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = trainable_variables or self._trainable_variables
        full = _without_gaps(list(grads), list(variables))
        reduced = grouped_allreduce(
            full, compression=compression, op=op, process_set=process_set
        )
        base.apply(self, reduced, trainable_variables)

    members = {"apply": apply, "_nbdist_base": base, "__module__": base.__module__}
    made: Any = type(base.__name__, (base,), members)
    distributed = made.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    _copy_state(optimizer, distributed)
    return distributed  # type: ignore[no-any-return]


def _without_gaps(grads: Sequence[Any], variables: Sequence[Any]) -> list[Tensor]:
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(grads, tensors_of(variables), strict=True)
    ]


def _copy_state(source: Any, target: Any) -> None:
    if source.built:
        target.build(source._trainable_variables)
        for own, other in zip(target.variables, source.variables, strict=True):
            own.assign(other)
