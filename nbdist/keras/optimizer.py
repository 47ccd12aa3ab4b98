"""DistributedOptimizer: a Keras optimizer that applies the gradients of all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from nbdist.errors import UsageError
from nbdist.horovod.compression import Compression, Compressor
from nbdist.horovod.gradients import NamedReduction
from nbdist.horovod.process_sets import ProcessSet, global_process_set
from nbdist.horovod.reduce_ops import Average, ReduceOp, Sum
from nbdist.training.keras_models import check_backend, reducing_optimizer

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
    the same options and state. The gradients of a step are reduced in buckets while
    backward runs, before clipping, weight decay and accumulation. A variable without a
    gradient counts as zero. A model saved with this optimizer can be loaded with the
    given optimizer's class.

    In a training step of your own, `scale_loss` begins the reductions: call it directly
    before `backward`, and pass `apply` the gradients that `backward` has computed.
    Without `scale_loss`, `apply` reduces the gradients that it is given.

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

    options: dict[str, Any] = {"compression": compression, "op": op}
    if process_set is not global_process_set:
        options["process_set"] = process_set
    reduction = NamedReduction(op, 1.0, compression, process_set)
    return reducing_optimizer(
        optimizer, reduction, partial(DistributedOptimizer, **options)
    )
