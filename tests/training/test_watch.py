"""`nbdist.watch`: the first value of a training that is not finite."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.errors import NotFinite, UsageError
from nbdist.training.watch import watch

STEPS = 12
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        hidden = self.first(x).tanh()
        return {"out": [x + self.second(hidden)], "count": torch.tensor(3)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            (x,) = block(x)["out"]
        return x.square().mean()


def train(
    model: nn.Module,
    steps: int = STEPS,
    at: int = 0,
    spoil: Callable[[], None] = lambda: None,
) -> None:
    """Train, and call `spoil` before step `at`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        model.last_step = step
        if step == at:
            spoil()
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).backward()
        optimizer.step()


def watched(model: nn.Module, *args: Any, **options: Any) -> None:
    """Train in the block of a watch."""
    with watch(model, **options):
        train(model, *args)


def spoil_output(module: nn.Module, value: float) -> None:
    """Put a value into the next output of a linear module."""

    def hook(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        spoiled = output.clone()
        spoiled.view(-1)[output.numel() // 2] = value
        return spoiled

    handle = module.register_forward_hook(hook, prepend=True)


def spoil_gradient(parameter: nn.Parameter, value: float) -> None:
    """Put a value into the next gradient of a parameter."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return gradient.index_fill(0, torch.tensor([1]), value)

    handle = parameter.register_hook(hook)


@pytest.mark.parametrize("seed", range(8))
def test_the_first_value_is_named_with_its_step(seed: int):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Model()
    value = draw.choice([float("nan"), float("inf"), -float("inf")])
    kind = "NaNs" if value != value else "infinite values"
    block = draw.choice(model.blocks)
    module = draw.choice([block.first, block.second])
    place = next(name for name, each in model.named_modules() if each is module)
    at = draw.randrange(2, STEPS)
    what, spoil = draw.choice(
        [
            (f"parameter {place}.bias", lambda: module.bias.data[1:2].fill_(value)),
            (f"the output of {place} (Linear)", lambda: spoil_output(module, value)),
            (
                f"the gradient of parameter {place}.bias",
                lambda: spoil_gradient(module.bias, value),
            ),
        ]
    )
    watch(model)
    with pytest.raises(NotFinite) as caught:
        train(model, at=at, spoil=spoil)
    assert model.last_step == at + 1  # the next forward
    assert str(caught.value).startswith(f"step {at}: {what} has {kind}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_values_are_no_alarm(dtype: torch.dtype):
    model = nn.Linear(WIDTH, WIDTH).to(dtype)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, torch.finfo(dtype).max)
    with watch(model):
        for _ in range(3):
            model(torch.zeros(2, WIDTH, dtype=dtype))


def test_complex_values_are_read():
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.phase.conj()).abs().sum()

    model = Phase()
    with watch(model):
        model(torch.ones(3)).backward()
    model.phase.data[1] = complex(1, float("nan"))
    with pytest.raises(NotFinite, match="step 1: parameter phase has NaNs"):
        watched_once(model, torch.ones(3))


def watched_once(model: nn.Module, x: torch.Tensor) -> None:
    with watch(model):
        model(x)


@pytest.mark.parametrize("steps", [300, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_finite_training_raises_no_alarm(steps: int):
    model = Model()
    infinite = torch.full((1, WIDTH), float("inf"))
    with watch(model):
        train(model, steps)
        model.eval()
        model(infinite)  # no step
        model.train()
        with torch.no_grad():
            model(infinite)


def test_a_check_each_few_steps_names_the_last_finite_one():
    model = Model()

    def spoil() -> None:
        for parameter in model.blocks[0].parameters():
            parameter.data.fill_(float("nan"))

    message = (
        r"step 8: parameter blocks.0.first.weight has NaNs, the first of \d+ such "
        r"values; the next is parameter blocks.0.first.bias. step 4 was finite: use "
        r"every=1"
    )
    with pytest.raises(NotFinite, match=message):
        watched(model, STEPS, 6, spoil, every=4)


def test_gradients_and_infinities_can_be_left_out():
    model = Model()
    bias = model.blocks[1].first.bias
    watched(model, 3, 3, partial(spoil_gradient, bias, float("nan")), gradients=False)
    model = Model()
    bias = model.blocks[1].first.bias
    watched(model, 1, 1, partial(spoil_gradient, bias, float("inf")), infinities=False)
    model = Model()
    bias = model.blocks[1].first.bias
    with pytest.raises(
        NotFinite, match=r"the gradient of parameter blocks\.1\.first\.bias"
    ):
        watched(model, 1, 1, partial(spoil_gradient, bias, float("inf")))


def test_the_end_of_the_block_looks_at_the_last_step_and_removes_all_hooks():
    model = Model()
    before = hooks_of(model)
    spoil = partial(spoil_gradient, model.blocks[0].first.bias, float("nan"))
    with pytest.raises(NotFinite, match="step 2: the gradient"):
        watched(model, 2, 2, spoil)
    assert hooks_of(model) == before

    def fail() -> None:
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        watched(Model(), 2, 2, fail)


def hooks_of(model: nn.Module) -> list[int]:
    of_modules = [
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.modules()
    ]
    return of_modules + [
        len(parameter._post_accumulate_grad_hooks or ())
        for parameter in model.parameters()
    ]


def test_a_second_watch_ends_the_first():
    model = Model()
    watch(model)
    count = hooks_of(model)
    watch(model)
    assert hooks_of(model) == count


def test_a_watched_model_is_not_kept_alive():
    model = Model()
    watch(model)
    train(model, 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_bad_arguments_are_refused():
    with pytest.raises(UsageError, match=r"needs a torch.nn.Module, got \[1\]"):
        watch([1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="every"):
        watch(Model(), every=0)
