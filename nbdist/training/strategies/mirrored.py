"""Mirrored: every rank has the model, and gradients are averaged during backward."""

# No `annotations` from __future__: DDP compares a hook's annotations with the types.
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.collectives import all_reduce, default_group
from nbdist.collectives.torch_backend.process_group import CollectiveWork
from nbdist.errors import UsageError
from nbdist.training.device import own_device
from nbdist.training.strategies.base import Strategy
from nbdist.training.strategies.keras_fit import keras_scope

__all__ = ["Mirrored", "MultiWorkerMirrored", "is_device", "named_device"]

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
        devices: the device of each rank, in rank order, such as `["cuda:0", "cuda:1"]`,
            or in TensorFlow's spelling `["/gpu:0", "/gpu:1"]`. The ranks have their
            devices from the start of the cluster; this only checks them. None for no
            check.
        options: options of DistributedDataParallel, such as
            `find_unused_parameters=True`.

    Raises:
        UsageError: `algorithm` has another value, or `devices` are not those of the
            ranks.
    """

    def __init__(
        self,
        algorithm: Algorithm = "auto",
        *,
        devices: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if algorithm not in ALGORITHMS:
            raise UsageError(f"algorithm={algorithm!r}: expected one of {ALGORITHMS}")
        if devices is not None:
            _check_devices(devices)
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

    def scope(self) -> AbstractContextManager[Strategy]:
        """Make `compile` and `fit` of Keras models in this block train on all ranks.

        Every rank must compile and fit. Each batch of `fit` is a global batch: with
        arrays or tensors, each rank trains on its part of it. All ranks begin with rank
        0's weights, gradients are averaged over the ranks, and so are the metrics of
        each epoch. Other data, such as a `PyDataset` or a generator, is used as it is,
        so each rank must have its own part.

        Raises:
            UsageError: Keras does not use its torch backend.
        """
        return keras_scope(self)


class MultiWorkerMirrored(Mirrored):
    """`Mirrored`, by the name that it has in tf.distribute for several workers.

    Args:
        communication: algorithm of the all-reduce: "auto", "ring" or "nccl", in small
            or capital letters.
        options: as for `Mirrored`.
    """

    def __init__(self, communication: str = "auto", **options: Any) -> None:
        algorithm: Any = str(communication).lower()
        if algorithm not in ALGORITHMS:
            raise UsageError(
                f"communication={communication!r}: expected one of {ALGORITHMS}"
            )
        super().__init__(algorithm, **options)


def named_device(name: str) -> torch.device:
    """The device of a name such as "cuda:1", or in TensorFlow's spelling "/gpu:1".

    Raises:
        UsageError: there is no such kind of device.
    """
    short = name.lower().rpartition("/")[2].removeprefix("device:")
    try:
        return torch.device(re.sub("^gpu", "cuda", short))
    except RuntimeError:
        raise UsageError(
            f"device {name!r}: expected a name such as 'cuda:0', '/gpu:0' or 'cpu'"
        ) from None


def is_device(wanted: torch.device, own: torch.device) -> bool:
    """Whether a device by its name is this rank's. All CPU devices are one."""
    index = own.index if wanted.index is None else wanted.index
    return wanted.type == own.type and (own.type == "cpu" or index == own.index)


def _check_devices(devices: Sequence[str]) -> None:
    """Check that these are the devices of the ranks, in rank order.

    Raises:
        UsageError: they are not.
    """
    group, own = default_group(), own_device()
    if isinstance(devices, str) or len(devices) != group.size:
        raise UsageError(
            f"devices={devices!r}: expected one for each of the {group.size} ranks. "
            "%dist_start -n chooses how many ranks there are, and --device their kind"
        )
    wanted = named_device(devices[group.rank])
    if not is_device(wanted, own):
        raise UsageError(
            f"devices={devices!r}: rank {group.rank} computes on {own}, not on "
            f"{wanted}. %dist_start --device chooses the kind; leave devices out to "
            "use the ranks' own"
        )


def _average_bucket(algorithm: str, bucket: GradBucket) -> Future[Tensor]:
    """Average one of DDP's buckets with this algorithm, while backward runs."""
    gradients = bucket.buffer()
    handle = all_reduce(gradients, "mean", algorithm=algorithm, async_op=True)
    averaged = CollectiveWork(handle, [gradients]).get_future()
    return averaged.then(lambda future: future.value()[0])
