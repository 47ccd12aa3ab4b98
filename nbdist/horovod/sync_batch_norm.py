"""Batch normalisation over the samples of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from nbdist.errors import UsageError
from nbdist.horovod.ops.allreduce import allreduce
from nbdist.horovod.process_sets import ProcessSet, global_process_set
from nbdist.horovod.reduce_ops import Sum

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """`torch.nn.BatchNorm` over the samples of all ranks. Every rank must call it.

    In training, the forward pass reduces two sums for each channel, and so does the
    backward pass. The ranks' batches may differ in size. In evaluation each rank uses
    the running statistics, which are equal on all ranks.

    Args:
        num_features: The number of channels C. The input has shape (N, C) or
            (N, C, ...) and a floating dtype.
        eps, momentum, affine, track_running_stats: As for `torch.nn.BatchNorm1d`.
        process_set: The ranks that take part. Default: all ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm({self.num_features}) of a tensor of shape "
                f"{tuple(input.shape)}: expected (N, {self.num_features}, ...)"
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        by_batch = self.training or not self.track_running_stats
        if not by_batch or self.process_set.size() == 1:
            return super().forward(input)
        mean, variance, count = self._statistics(input)
        if self.training and self.track_running_stats:
            self._remember(mean.detach(), variance.detach(), count)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        normalised = (input.to(mean.dtype) - _spread(mean, input)) * _spread(
            scale, input
        )
        if self.bias is not None:
            normalised = normalised + _spread(self.bias, input)
        return normalised.to(input.dtype)

    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mean, variance and number of values of a channel, over all ranks.

        The variance is computed in a second pass, from the differences to the mean. The
        difference of mean square and squared mean would lose all digits if the mean is
        large. Gradients flow through the sums.
        """
        wide = input.float() if input.dtype.itemsize < 4 else input
        rows = wide.transpose(0, 1).reshape(self.num_features, -1)
        own = rows.new_tensor([float(rows.shape[1])])
        sums = self._sum(torch.cat([rows.sum(1), own]))
        count = float(sums[-1])
        if count < 2:
            raise UsageError(
                f"SyncBatchNorm: {count:.0f} values for a channel on all ranks "
                "together: expected 2 or more in training"
            )
        mean = sums[:-1] / count
        variance = self._sum((rows - mean[:, None]).square().sum(1)) / count
        return mean, variance, count

    def _sum(self, tensor: Tensor) -> Tensor:
        return allreduce(tensor, op=Sum, process_set=self.process_set)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # the average over all batches
            share = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _spread(channels: Tensor, like: Tensor) -> Tensor:
    """One value for each channel, in a shape that broadcasts to (N, C, ...)."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
