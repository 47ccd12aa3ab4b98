"""TPU: Mirrored on the device of torch_xla."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbdist.errors import UsageError
from nbdist.training.strategies.mirrored import Mirrored

__all__ = ["TPU"]


class TPU(Mirrored):
    """`Mirrored` on the device that torch_xla gives this rank's process.

    The loader of `distribute` copies batches to the device. Gradients are averaged
    through host memory. torch_xla collects operations and compiles them when a result
    is needed; here also after each step of the optimizer.

    Written for TPUs, and run on XLA's CPU device (`PJRT_DEVICE=CPU`), with torch and
    torch_xla 2.9.

    Args:
        options: options of DistributedDataParallel.

    Raises:
        UsageError: torch_xla is not installed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        try:
            import torch_xla
        except ImportError as error:
            raise UsageError(
                f"TPU needs torch_xla ({error}): install the torch_xla of torch "
                f"{torch.__version__}, or use Mirrored"
            ) from error
        self._sync = torch_xla.sync
        self.device = torch_xla.device()
        """The device of this rank's process."""

    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Return the model in DistributedDataParallel, and the optimizer unchanged.

        Every rank must call. Rank 0's parameters and buffers are copied to all ranks.

        Args:
            model: on `device`.
            optimizer: over the model's parameters, made after the model was moved.

        Raises:
            UsageError: a parameter is on another device.
        """
        found = {parameter.device for parameter in model.parameters()} - {self.device}
        if found:
            raise UsageError(
                f"TPU: the model is on {', '.join(map(str, found))}: move it with "
                "model.to(strategy.device) before you make the optimizer"
            )
        replica, optimizer = super().setup(model, optimizer)
        optimizer.register_step_post_hook(lambda *_: self._sync())
        return replica, optimizer
