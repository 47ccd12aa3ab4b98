"""Mirrored: every rank has the model, and gradients are averaged during backward."""

# No `annotations` from __future__: DDP compares a hook's annotations with the types.
from typing import Any, Literal

from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.collectives import all_reduce, default_group
from nbdist.collectives.torch_backend.process_group import CollectiveWork
from nbdist.errors import UsageError
from nbdist.training.strategies.base import Strategy

__all__ = ["Mirrored"]

Algorithm = Literal["auto", "ring", "nccl"]
ALGORITHMS = ("auto", "ring", "nccl")


class Mirrored(Strategy):
    """Every rank holds the model and the optimizer's state, and takes the same steps.

    The model is wrapped in torch's DistributedDataParallel (Li et al., "PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
    arXiv:2006.15704), with its `no_sync`, hooks and `join`.

    Args:
        algorithm: algorithm of the all-reduce: "auto" for the process group's best
            one, "ring", or "nccl" (on GPUs).
        options: options of DistributedDataParallel, such as
            `find_unused_parameters=True`.

    Raises:
        UsageError: `algorithm` has another value.
    """

    def __init__(self, algorithm: Algorithm = "auto", **options: Any) -> None:
        super().__init__()
        if algorithm not in ALGORITHMS:
            raise UsageError(f"algorithm={algorithm!r}: expected one of {ALGORITHMS}")
        self.algorithm = algorithm
        self._options = options

    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Return the model in DistributedDataParallel, and the optimizer unchanged.

        Every rank must call.

        Raises:
            UsageError: the algorithm is not available on the model's device.
        """
        replica = DistributedDataParallel(model, **self._options)
        if self.algorithm != "auto":
            device = next(model.parameters()).device.type
            default_group().transport(device, self.algorithm)
            replica.register_comm_hook(self.algorithm, _average_bucket)
        return replica, optimizer


def _average_bucket(algorithm: str, bucket: GradBucket) -> Future[Tensor]:
    """Average one of DDP's buckets with this algorithm, while backward runs."""
    gradients = bucket.buffer()
    handle = all_reduce(gradients, "mean", algorithm=algorithm, async_op=True)
    averaged = CollectiveWork(handle, [gradients]).get_future()
    return averaged.then(lambda future: future.value()[0])
