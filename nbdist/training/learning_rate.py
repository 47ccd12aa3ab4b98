"""Learning rates for the large batches of many ranks.

After Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017
(arXiv:1706.02677): for a batch k times as large, multiply the learning rate by k
(section 2.1), and reach that rate gradually over the first epochs (section 2.2).
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from nbdist.errors import UsageError
from nbdist.training.data.sampler import rank_and_size
from nbdist.training.validation import whole_number

__all__ = ["scale_lr", "warmup"]


def scale_lr(optimizer: Optimizer, factor: float | None = None) -> float:
    """Multiply an optimizer's learning rates, for a batch that many ranks share.

    Call it once, on every rank, before a scheduler is made.

    Args:
        optimizer: the rates of all its parameter groups are changed in place.
        factor: the factor. Default: the number of ranks, for a learning rate that was
            chosen for the batch of one rank.

    Returns:
        The factor.

    Raises:
        UsageError: the factor is not positive, or the optimizer has a scheduler, which
            would return to the old rates.
    """
    scale = float(rank_and_size(None)[1] if factor is None else factor)
    if not scale > 0:
        raise UsageError(f"factor={factor!r}: expected a number above 0")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError(
            "this optimizer has a scheduler, which would use the old learning rate: "
            "call scale_lr first, and make the scheduler after it"
        )
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(scale)
        else:
            group["lr"] *= scale
    return scale


def warmup(
    optimizer: Optimizer, steps: int, *, start_factor: float | None = None
) -> LinearLR:
    """Make a scheduler that raises the learning rate linearly to the optimizer's rate.

    It is one of torch's schedulers: call its `step()` after each step of the optimizer,
    or make it the first scheduler of a `torch.optim.lr_scheduler.SequentialLR`, with
    `steps` as the milestone.

    Args:
        optimizer: its learning rate is the rate to reach, as `scale_lr` has set it.
        steps: number of steps until the rate is reached; five epochs in the paper.
        start_factor: the first rate, as a fraction of the rate to reach. Default: 1
            divided by the number of ranks, which gives the rate before `scale_lr`.

    Raises:
        UsageError: a number is out of range.
    """
    steps = whole_number("steps", steps, 1)
    start = 1 / rank_and_size(None)[1] if start_factor is None else start_factor
    if not 0 < start <= 1:
        raise UsageError(f"start_factor={start!r}: expected above 0, and 1 at most")
    return LinearLR(optimizer, start_factor=start, end_factor=1.0, total_iters=steps)
