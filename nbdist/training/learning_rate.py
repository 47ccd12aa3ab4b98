"""Learning rates for the large batches of many ranks.

Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017
(arXiv:1706.02677): when the batch grows k times, take a learning rate k times as large
(section 2.1), and reach it gradually over the first epochs (section 2.2).
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from nbdist.errors import UsageError
from nbdist.training.data.sampler import place_in
from nbdist.training.validation import whole_number

__all__ = ["scale_lr", "warmup"]


def scale_lr(optimizer: Optimizer, factor: float | None = None) -> float:
    """Multiply an optimizer's learning rates, for a batch that many ranks share.

    Call it once, on every rank, before a scheduler is made.

    Args:
        optimizer: changed in place, each of its parameter groups.
        factor: default the number of ranks: each has a batch of the size that the
            learning rate was chosen for.

    Returns:
        The factor.

    Raises:
        UsageError: the factor is not positive, or a scheduler remembers the old rates.
    """
    scale = float(place_in(None)[1] if factor is None else factor)
    if not scale > 0:
        raise UsageError(f"factor={factor!r}: expected a number above 0")
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError(
            "this optimizer has a scheduler, which goes on from the old learning rate: "
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
    """A schedule that reaches the optimizer's learning rate in even steps.

    An ordinary scheduler of torch's: call its `step()` after each step of the
    optimizer, or make it the first of a `torch.optim.lr_scheduler.SequentialLR`, with
    `steps` for its milestone.

    Args:
        optimizer: with the rate to reach, as `scale_lr` has left it.
        steps: until it is reached; the paper takes those of five epochs.
        start_factor: where to begin, as a part of that rate; default one through the
            number of ranks, which is the rate before `scale_lr`.

    Raises:
        UsageError: a number is out of range.
    """
    steps = whole_number("steps", steps, 1)
    start = 1 / place_in(None)[1] if start_factor is None else start_factor
    if not 0 < start <= 1:
        raise UsageError(f"start_factor={start!r}: expected above 0, and 1 at most")
    return LinearLR(optimizer, start_factor=start, end_factor=1.0, total_iters=steps)
