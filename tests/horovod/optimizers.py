"""DistributedOptimizer on ranks, compared with one process on the full batch.

`test_distributed_optimizer.py` launches this file. All is in double precision, so that
rounding does not hide a missing or doubled contribution.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nbdist.horovod as hvd
from nbdist.errors import ReductionPending, UsageError
from nbdist.horovod.adasum import combine_pair

STEPS = 5
BATCH = 8
"""Samples of one rank in one step."""
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def run_all_cases() -> dict[str, str | None]:
    from horovod_cases import run_cases

    torch.set_default_dtype(torch.float64)
    return run_cases(CASES)


def model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)
    )


def samples(count: int) -> tuple[Tensor, Tensor]:
    """The same on every rank."""
    torch.manual_seed(2)
    return torch.randn(count, 6), torch.randn(count, 3)


def mine(tensor: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    return tensor.chunk(hvd.size())[hvd.rank()]


def train(net: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(net(inputs), targets).backward()
    optimizer.step()


def compare(
    make: Make = OPTIMIZERS["momentum"], rtol: float = 1e-10, **options: Any
) -> None:
    """Compare steps of a distributed optimizer with one process on the full batch."""
    reference, net = model(), model()
    single = make(reference.parameters())
    optimizer = hvd.DistributedOptimizer(
        make(net.parameters()), named_parameters=net.named_parameters(), **options
    )
    assert isinstance(optimizer, type(single))
    inputs, targets = samples(hvd.size() * BATCH)
    for _ in range(STEPS):
        train(net, optimizer, mine(inputs), mine(targets))
        train(reference, single, inputs, targets)
    assert_equal(net, reference, rtol)


def assert_equal(net: nn.Module, reference: nn.Module, rtol: float = 1e-10) -> None:
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    for parameter, expected in pairs:
        torch.testing.assert_close(parameter, expected, rtol=rtol, atol=rtol)


def assert_same_everywhere(net: nn.Module) -> None:
    """Check that all ranks have the same bits."""
    for parameter in net.parameters():
        everybody = hvd.allgather(parameter.detach()[None])
        assert all(torch.equal(each, parameter) for each in everybody)


# -- equal to one process --------------------------------------------------------------


@case
def sgd() -> None:
    compare(OPTIMIZERS["sgd"])


@case
def momentum() -> None:
    compare(OPTIMIZERS["momentum"])


@case
def adam() -> None:
    compare(OPTIMIZERS["adam"])


@case
def adamw() -> None:
    compare(OPTIMIZERS["adamw"])


@case
def any_buckets() -> None:
    for threshold in (0, 200, 2000, 2**30):
        compare(fusion_threshold=threshold)
    for groups in (1, 3, 100):
        compare(num_groups=groups)
    compare(groups=2)
    reference, net = model(), model()
    parameters = list(net.parameters())
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](parameters), groups=[parameters[::2], [parameters[1]]]
    )
    single = OPTIMIZERS["sgd"](reference.parameters())
    inputs, targets = samples(hvd.size() * BATCH)
    for _ in range(STEPS):
        train(net, optimizer, mine(inputs), mine(targets))
        train(reference, single, inputs, targets)
    assert_equal(net, reference)


@case
def predivided() -> None:
    compare(gradient_predivide_factor=4.0)


@case
def summed() -> None:
    reference, net = model(), model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](net.parameters()), op=hvd.Sum
    )
    single = OPTIMIZERS["sgd"](reference.parameters())
    inputs, targets = samples(hvd.size() * BATCH)
    for _ in range(STEPS):
        train(net, optimizer, mine(inputs), mine(targets) / hvd.size())
        single.zero_grad()
        loss = F.mse_loss(reference(inputs), targets / hvd.size())
        (loss * hvd.size()).backward()
        single.step()
    assert_equal(net, reference)


@case
def compressed() -> None:
    compare(compression=hvd.Compression.fp16, rtol=5e-3)
    compare(compression=hvd.Compression.bf16, rtol=3e-2)


@case
def accumulated() -> None:
    reference, net = model(), model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](net.parameters()), backward_passes_per_step=3
    )
    single = OPTIMIZERS["momentum"](reference.parameters())
    inputs, targets = samples(3 * hvd.size() * BATCH)
    parts = list(zip(inputs.chunk(3), targets.chunk(3), strict=True))
    for keep in (True, False, True):
        optimizer.zero_grad(set_to_none=keep)
        single.zero_grad()
        for x, y in parts:
            F.mse_loss(net(mine(x)), mine(y)).backward()
            F.mse_loss(reference(x), y).backward()
        optimizer.step()
        single.step()
    optimizer.set_backward_passes_per_step(1)
    for x, y in parts:
        train(net, optimizer, mine(x), mine(y))
        train(reference, single, x, y)
    assert_equal(net, reference)


@case
def clipped() -> None:
    reference, net = model(), model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](net.parameters()))
    single = OPTIMIZERS["momentum"](reference.parameters())
    inputs, targets = samples(hvd.size() * BATCH)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(net(mine(inputs)), mine(targets)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        single.zero_grad()
        F.mse_loss(reference(inputs), targets).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        single.step()
    assert_equal(net, reference)
    optimizer.zero_grad()
    F.mse_loss(net(mine(inputs)), mine(targets)).backward()
    optimizer.synchronize()
    # A script for Horovod may filter the warning by these words.
    words = r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)"
    with pytest.warns(UserWarning, match=words):
        optimizer.step()


@case
def with_a_closure() -> None:
    reference, net = model(), model()
    inputs, targets = samples(hvd.size() * BATCH)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(net.parameters(), max_iter=4)
    )
    single = torch.optim.LBFGS(reference.parameters(), max_iter=4)

    def evaluate(which: nn.Module, owner: Any, x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            owner.zero_grad()
            loss = F.mse_loss(which(x), y)
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        optimizer.step(evaluate(net, optimizer, mine(inputs), mine(targets)))
        single.step(evaluate(reference, single, inputs, targets))
    assert_same_everywhere(net)
    # The stopping rules use each rank's own loss; the weights are equal.
    assert_equal(net, reference, rtol=1e-6)


@case
def with_a_schedule_and_state() -> None:
    reference, net = model(), model()
    single = OPTIMIZERS["adam"](reference.parameters())
    own = OPTIMIZERS["adam"](net.parameters())
    early = torch.optim.lr_scheduler.ExponentialLR(own, 0.5)  # made before wrapping
    optimizer = hvd.DistributedOptimizer(own)
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(single, 0.5),
        torch.optim.lr_scheduler.StepLR(single, 1, 0.9),
    ]
    inputs, targets = samples(hvd.size() * BATCH)
    for step in range(STEPS):
        train(net, optimizer, mine(inputs), mine(targets))
        train(reference, single, inputs, targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `own` itself takes no step
            for schedule in (early, late, *schedules):
                schedule.step()
        if step == 2:
            state = optimizer.state_dict()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](net.parameters()))
            optimizer.load_state_dict(state)
            schedules = []
    assert_same_everywhere(net)
    assert_equal(net, reference)


@case
def wrapped_again() -> None:
    reference, net = model(), model()
    single = OPTIMIZERS["momentum"](reference.parameters())
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    inputs, targets = samples(hvd.size() * BATCH)
    for _ in range(3):  # as when a cell is run again
        optimizer = hvd.DistributedOptimizer(optimizer)
        assert type(optimizer).__mro__[2] is torch.optim.SGD
        for _ in range(2):
            train(net, optimizer, mine(inputs), mine(targets))
            train(reference, single, inputs, targets)
    assert_equal(net, reference)


# -- parameters that not every rank uses -----------------------------------------------


class Branches(nn.Module):
    """Uses one of two layers. A third is never used, a fourth is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList([nn.Linear(6, 3) for _ in range(4)])
        self.layers[3].requires_grad_(False)

    def forward(self, inputs: Tensor, which: int) -> Tensor:
        output: Tensor = self.layers[which](inputs) + self.layers[3](inputs)
        return output


@case
def unused_and_frozen() -> None:
    size, rank = hvd.size(), hvd.rank()
    if size == 1:
        return  # plain torch: what is not used has no gradient
    reference, net = Branches(), Branches()
    make = OPTIMIZERS["momentum"]
    optimizer = hvd.DistributedOptimizer(
        make(net.parameters()), named_parameters=net.named_parameters()
    )
    single = make(reference.parameters())
    inputs, targets = samples(size * BATCH)
    for step in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(net(mine(inputs), (rank + step) % 2), mine(targets)).backward()
        optimizer.step()
        for parameter in reference.layers[:3].parameters():
            parameter.grad = torch.zeros_like(parameter)
        for peer in range(size):
            x, y = inputs.chunk(size)[peer], targets.chunk(size)[peer]
            loss = F.mse_loss(reference(x, (peer + step) % 2), y) / size
            loss.backward()
        single.step()
    assert_equal(net, reference)
    assert net.layers[3].weight.grad is None
    assert torch.equal(net.layers[2].weight.grad, torch.zeros(3, 6))


@case
def layers_in_another_order_on_each_rank() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layers = nn.ModuleList([nn.Linear(6, 3) for _ in range(6)])

        def forward(self, inputs: Tensor, order: list[int]) -> Tensor:
            output = self.layers[order[0]](inputs)
            for at in order[1:]:  # the last added gets its gradient first
                output = output + self.layers[at](inputs)
            return output

    size = hvd.size()
    reference, net = Parallel(), Parallel()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](net.parameters()), fusion_threshold=100
    )
    single = OPTIMIZERS["sgd"](reference.parameters())
    inputs, targets = samples(size * BATCH)
    for step in range(STEPS):
        order = [(at * 5 + hvd.rank() + step) % 6 for at in range(6)]
        optimizer.zero_grad()
        F.mse_loss(net(mine(inputs), order), mine(targets)).backward()
        other = hvd.allreduce(torch.ones(1))  # among the buckets that are under way
        assert other.item() == pytest.approx(1.0)
        optimizer.step()
        single.zero_grad()
        F.mse_loss(reference(inputs, list(range(6))), targets).backward()
        single.step()
    assert_equal(net, reference)


@case
def sparse() -> None:
    for as_dense in (False, True):
        torch.manual_seed(3)
        reference = nn.EmbeddingBag(10, 4, mode="sum")
        net = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
        net.load_state_dict(reference.state_dict())
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](net.parameters()), sparse_as_dense=as_dense
        )
        single = OPTIMIZERS["sgd"](reference.parameters())
        words = torch.arange(hvd.size() * 6).view(-1, 3) % 7
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(mine(words)).square().mean().backward()
            optimizer.step()
            assert net.weight.grad.is_sparse
            single.zero_grad()
            reference(words).square().mean().backward()
            single.step()
        assert_equal(net, reference)


@case
def uneven_data() -> None:
    size, rank = hvd.size(), hvd.rank()
    reference, net = model(), model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](net.parameters()), fusion_threshold=500
    )
    single = OPTIMIZERS["sgd"](reference.parameters())
    inputs, targets = samples(size * BATCH)
    for _ in range(rank):  # rank 0 has no data at all
        train(net, optimizer, mine(inputs), mine(targets))
    assert hvd.join() == size - 1
    for step in range(size - 1):
        single.zero_grad()
        for peer in range(step + 1, size):
            x, y = inputs.chunk(size)[peer], targets.chunk(size)[peer]
            (F.mse_loss(reference(x), y) / size).backward()
        single.step()
    # A rank keeps its parameters until the last rank broadcasts its own.
    hvd.broadcast_parameters(net.state_dict(), root_rank=size - 1)
    assert_equal(net, reference)


@case
def among_some_ranks() -> None:
    if hvd.size() < 3:
        return
    halves = [hvd.add_process_set(range(first, hvd.size(), 2)) for first in (0, 1)]
    own = halves[hvd.rank() % 2]
    reference, net = model(), model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adam"](net.parameters()), process_set=own
    )
    single = OPTIMIZERS["adam"](reference.parameters())
    inputs, targets = samples(hvd.size() * BATCH)
    rows = [(inputs.chunk(hvd.size())[r], targets.chunk(hvd.size())[r])
            for r in own.ranks]  # fmt: skip
    for _ in range(STEPS):
        train(net, optimizer, mine(inputs), mine(targets))
        train(reference, single, *map(torch.cat, zip(*rows, strict=True)))
    assert_equal(net, reference)


@case
def outside_of_the_process_set() -> None:
    """A rank that is no member steps alone."""
    if hvd.size() == 1:
        return
    first = hvd.add_process_set([0])
    reference, net = model(), model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](net.parameters()), process_set=first
    )
    single = OPTIMIZERS["momentum"](reference.parameters())
    for step in range(STEPS):
        inputs, targets = samples(hvd.size() * BATCH)
        train(net, optimizer, mine(inputs) + step, mine(targets))
        train(reference, single, mine(inputs) + step, mine(targets))
    assert_equal(net, reference)


@case
def state_broadcast_between_steps() -> None:
    kinds = (
        "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam",
        "RMSprop", "Rprop", "SGD",
    )  # fmt: skip
    for kind in kinds:
        net = model()
        make = getattr(torch.optim, kind)
        optimizer = hvd.DistributedOptimizer(make(net.parameters(), lr=0.01))
        inputs, targets = samples(hvd.size() * BATCH)
        for _ in range(3):
            train(net, optimizer, mine(inputs), mine(targets))
            hvd.broadcast_parameters(net.state_dict(), root_rank=hvd.size() - 1)
            hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
        assert_same_everywhere(net)


# -- Adasum ----------------------------------------------------------------------------


@case
def adasum() -> None:
    size = hvd.size()
    net, inputs, targets = model(), *samples(size * BATCH)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](net.parameters()), op=hvd.Adasum
    )
    alone = [model() for _ in range(size)]
    singles = [OPTIMIZERS["momentum"](each.parameters()) for each in alone]
    for _ in range(STEPS):
        starts = [each.detach().clone() for each in net.parameters()]
        train(net, optimizer, mine(inputs), mine(targets))
        for rank in range(size):
            x, y = inputs.chunk(size)[rank], targets.chunk(size)[rank]
            train(alone[rank], singles[rank], x, y)
        for at, (start, parameter) in enumerate(
            zip(starts, net.parameters(), strict=True)
        ):
            steps = [list(each.parameters())[at].detach() - start for each in alone]
            while len(steps) > 1:
                pairs = zip(steps[::2], steps[1::2], strict=False)
                rest = steps[len(steps) // 2 * 2 :]
                steps = [combine_pair(*pair) for pair in pairs] + rest
            torch.testing.assert_close(parameter.detach(), start + steps[0])
        for each in alone:
            each.load_state_dict(net.state_dict())
    assert_same_everywhere(net)
    with pytest.raises(UsageError, match="no meaning"), optimizer.skip_synchronize():
        pass


# -- batch normalisation ---------------------------------------------------------------


@case
def sync_batch_norm() -> None:
    size, rank = hvd.size(), hvd.rank()
    for shape, options in (
        ((4,), {}),
        ((4, 5), {"momentum": None}),
        ((4, 3, 2), {"affine": False, "track_running_stats": False}),
        ((4, 2, 2, 2), {"eps": 0.1}),
    ):
        makers = {
            1: nn.BatchNorm1d,
            2: nn.BatchNorm1d,
            3: nn.BatchNorm2d,
            4: nn.BatchNorm3d,
        }
        single = makers[len(shape)](4, **options)
        ours = hvd.SyncBatchNorm(4, **options)
        torch.manual_seed(6)
        if single.affine:
            nn.init.uniform_(single.weight)
            ours.load_state_dict(single.state_dict())
        for _ in range(3):
            # Rank r has r + 1 samples, and a mean far from zero.
            whole = (torch.randn(size * (size + 1) // 2, *shape) + 50).requires_grad_()
            factors = torch.randn(whole.shape)
            pieces = [r + 1 for r in range(size)]
            part = whole.detach().split(pieces)[rank].clone().requires_grad_()
            if len(whole) * whole[0, 0].numel() < 2:
                continue
            expected, got = single(whole), ours(part)
            torch.testing.assert_close(got, expected.split(pieces)[rank])
            (expected * factors).sum().backward()
            (got * factors.split(pieces)[rank]).sum().backward()
            torch.testing.assert_close(part.grad, whole.grad.split(pieces)[rank])
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, single.state_dict()[name])
        for grad_of, expected in zip(
            ours.parameters(), single.parameters(), strict=True
        ):
            total = (
                hvd.allreduce(grad_of.grad, op=hvd.Sum) if size > 1 else grad_of.grad
            )
            if expected.grad is not None:
                torch.testing.assert_close(total, expected.grad)
        single.eval(), ours.eval()
        torch.testing.assert_close(ours(whole), single(whole))
    half = hvd.SyncBatchNorm(2).to(torch.float32)(torch.randn(6, 2).half())
    assert half.dtype == torch.float16
    with pytest.raises(ValueError, match=r"expected \(N, 2"):
        hvd.SyncBatchNorm(2)(torch.randn(5, 3))


# -- misuse ----------------------------------------------------------------------------


@case
def zero_grad_while_reducing() -> None:
    net, (inputs, targets) = model(), samples(hvd.size() * BATCH)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()))
    for _ in range(2):  # before the buckets are made, and after
        F.mse_loss(net(mine(inputs)), mine(targets)).backward()
        with pytest.raises(AssertionError, match="before step"):
            optimizer.zero_grad()
        with pytest.raises(ReductionPending):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


@case
def more_passes_than_said() -> None:
    net, (inputs, targets) = model(), samples(hvd.size() * BATCH)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()))
    train(net, optimizer, mine(inputs), mine(targets))
    F.mse_loss(net(mine(inputs)), mine(targets)).backward()
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        F.mse_loss(net(mine(inputs)), mine(targets)).backward()


@case
def bad_options() -> None:
    net = model()
    plain = OPTIMIZERS["sgd"](net.parameters())
    named = list(net.named_parameters())
    for options, text in (
        ({"op": hvd.Max}, "expected hvd.Average"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "only to op=hvd.Average"),
        ({"named_parameters": named[:-1]}, "1 of the optimizer's parameters"),
        ({"named_parameters": named + named[:1]}, "more than one is named 0.weight"),
        ({"named_parameters": net.parameters()}, "expected pairs"),
        ({"backward_passes_per_step": 0}, "1 or more"),
        ({"fusion_threshold": -1}, "0 or more"),
        ({"groups": [[named[0][1]], [named[0][1]]]}, "more than one group"),
        ({"num_groups": -2}, "0 or more"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(plain, **options)
