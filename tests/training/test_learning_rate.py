"""Learning rates are scaled by the number of ranks, and warmed up."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR

from nbdist.errors import UsageError
from nbdist.training.learning_rate import scale_lr, warmup


def optimizer(lr: object = 0.1) -> torch.optim.SGD:
    first, second = torch.nn.Linear(2, 2).parameters()
    groups = [{"params": [first]}, {"params": [second], "lr": 0.5}]
    return torch.optim.SGD(groups, lr=lr)


def test_every_group_is_scaled():
    scaled = optimizer()
    assert scale_lr(scaled, 4) == 4
    assert [group["lr"] for group in scaled.param_groups] == pytest.approx([0.4, 2.0])
    assert scale_lr(optimizer()) == 1  # a world of one


def test_a_rate_that_is_a_tensor_is_scaled_in_place():
    rate = torch.tensor(0.1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    scale_lr(torch.optim.Adam([parameter], lr=rate, capturable=False), 8)
    torch.testing.assert_close(rate, torch.tensor(0.8))


def test_scaling_after_a_scheduler_was_made_is_refused():
    late = optimizer()
    warmup(late, 10)
    with pytest.raises(UsageError, match="call scale_lr first"):
        scale_lr(late, 4)


# SequentialLR of torch 2.7 gives an epoch to the schedules.
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_the_rate_rises_linearly_and_another_schedule_follows():
    scaled = optimizer()
    scale_lr(scaled, 4)
    rising = warmup(scaled, 4, start_factor=1 / 4)
    falling = CosineAnnealingLR(scaled, T_max=2)
    schedule = SequentialLR(scaled, [rising, falling], milestones=[4])
    rates = []
    for _ in range(7):
        rates.append(scaled.param_groups[0]["lr"])
        scaled.step()
        schedule.step()
    expected = [0.1, 0.175, 0.25, 0.325, 0.4, 0.2, 0.0]
    assert rates == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scale_lr(optimizer(), 0), "factor=0"),
        (lambda: warmup(optimizer(), 0), "steps=0"),
        (lambda: warmup(optimizer(), 2, start_factor=2.0), "start_factor=2.0"),
    ],
)
def test_invalid_numbers_are_refused(call, says):
    with pytest.raises(UsageError, match=says):
        call()
