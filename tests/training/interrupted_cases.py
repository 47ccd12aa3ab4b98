"""Trainings that a test ends at any line, and then trains again. Ranks import it."""

from __future__ import annotations

import copy
import dis
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import nbdist
import nbdist.horovod as hvd
from nbdist import elastic, strategies

PACKAGE = Path(nbdist.__file__).parent
OURS = tuple(str(PACKAGE / each) for each in ("training", "horovod", "keras"))
STEPS = 3
SAMPLES = 24
CASES: dict[str, Callable[[], Case]] = {}


class Failure(Exception):
    """Raised at a drawn line."""


@contextmanager
def ended(after: int | None, kind: str) -> Iterator[list[int]]:
    """Count the lines of this package that run, and end the block at a drawn one.

    The ends of the methods of locks, which lines of this package call, count as lines.

    Args:
        after: the line that ends the block; None for none.
        kind: "error" to raise there, "interrupt" to send SIGINT.
    """
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        is_lock = name == threading.__file__ and _is_called_here(frame)
        if not is_lock and not name.startswith((*OURS, __file__)):
            return None
        if event == ("return" if is_lock else "line") and not _loads_none(frame):
            count[0] += 1
            if count[0] == after:
                if kind == "error":
                    raise Failure(f"at {name}:{frame.f_lineno}")
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def _is_called_here(frame: FrameType | None) -> bool:
    """Whether a line of nbdist has called a method of a lock."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(str(PACKAGE))


def _loads_none(frame: FrameType) -> bool:
    """Whether the frame is about to load None, where no signal is handled.

    The end of a `with` statement begins so. Python lets no interrupt come between the
    body and the exit, which a failure of the trace function would skip.
    """
    code, at = frame.f_code, frame.f_lasti
    opcode, argument = code.co_code[at : at + 2]
    return dis.opname[opcode] == "LOAD_CONST" and code.co_consts[argument] is None


class Case:
    """Something that outlives a cell."""

    is_repeated = True
    """Whether each `train` gives the result of the first."""

    def reset(self) -> None:
        """Set the user's own state back."""

    def train(self) -> Tensor:
        """Train, on all ranks; a result that must be equal on all."""
        raise NotImplementedError


class Network(nn.Module):
    def __init__(self, norm: nn.Module | None = None, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, sparse=sparse)
        self.norm = norm or nn.Identity()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, indices: Tensor) -> Tensor:
        out: Tensor = self.layers(self.norm(self.embedding(indices)))
        return out


def batches() -> Iterator[Tensor]:
    """This rank's samples of each step."""
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(step)
        samples = torch.randint(10, (SAMPLES,), generator=numbers)
        yield samples[nbdist.rank() :: nbdist.size()]


class Loop(Case):
    """The user's loop over a model and an optimizer."""

    passes = 1

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.first = copy.deepcopy(model.state_dict())

    def reset(self) -> None:
        self.model.load_state_dict(self.first)
        self.optimizer.state.clear()  # as `load_state_dict`, without its side effects

    def train(self) -> Tensor:
        for batch in batches():
            self.optimizer.zero_grad()
            for part in batch.chunk(self.passes):
                loss = self.model(part).square().mean() / self.passes
                loss.backward()
            self.optimizer.step()
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])


def network(norm: nn.Module | None = None, *, sparse: bool = False) -> Network:
    torch.manual_seed(0)
    return Network(norm, sparse=sparse).double()


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def horovod(model: nn.Module, momentum: float = 0.9, **options: Any) -> Loop:
    hvd.init()
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(sgd(model, momentum), named, **options)
    loop = Loop(model, optimizer)
    loop.passes = options.get("backward_passes_per_step", 1)
    return loop


@case
def plain() -> Case:
    return horovod(network(), fusion_threshold=100)


@case
def two_passes() -> Case:
    return horovod(network(), backward_passes_per_step=2)


@case
def adasum() -> Case:
    return horovod(network(), op=hvd.Adasum)


@case
def compressed() -> Case:
    return horovod(network(), compression=hvd.Compression.fp16)


@case
def grouped() -> Case:
    return horovod(network(), num_groups=3)


@case
def sparse() -> Case:
    return horovod(network(sparse=True), momentum=0.0)


@case
def synchronous_norm() -> Case:
    return horovod(network(hvd.SyncBatchNorm(6)))


def under(strategy: strategies.Strategy) -> Loop:
    model = network()
    return Loop(*strategy.setup(model, sgd(model)))


@case
def mirrored() -> Case:
    return under(strategies.Mirrored())


@case
def ring() -> Case:
    return under(strategies.Mirrored("ring"))


@case
def central() -> Case:
    return under(strategies.CentralStorage(root=1))


@case
def local() -> Case:
    loop = under(strategies.LocalSGD(every=2, optimizer_state=True))
    loop.is_repeated = True
    loop.train = lambda: _averaged(loop)  # type: ignore[method-assign]
    return loop


def _averaged(loop: Loop) -> Tensor:
    weights = Loop.train(loop)
    nbdist.all_reduce(weights, "mean")  # STEPS is odd: the last step is not averaged
    return weights


class Served(Loop):
    """A loop with a parameter server. The order of the updates does not matter."""

    def __init__(self, **options: Any) -> None:
        self.strategy = strategies.ParameterServer(1, **options)
        model = network()
        super().__init__(*self.strategy.setup(model, sgd(model, momentum=0.0)))

    def train(self) -> Tensor:
        self.strategy.run(self.body)
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])

    def body(self) -> None:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            sum(each.sum() for each in self.model.parameters()).backward()
            self.optimizer.step()


@case
def served() -> Case:
    return Served()


@case
def served_at_once() -> Case:
    return Served(mode="async")


@case
def served_within_a_bound() -> Case:
    return Served(mode="async", max_staleness=1)


class Loaded(Case):
    """All ranks take the same number of steps, and go to the same position."""

    is_repeated = False

    def __init__(self) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(100.0))
        self.loader = nbdist.loader(data, 3, seed=1, device="cpu")

    def train(self) -> Tensor:
        left = sum(1 for _ in self.loader)
        state = self.loader.state_dict()
        return torch.tensor([left, state["epoch"], state["position"]])


@case
def loader() -> Case:
    return Loaded()


class Committed(Case):
    """All ranks restore the same commit."""

    is_repeated = False

    def __init__(self) -> None:
        self.state = elastic.State(weights=torch.zeros(3), step=0)

    def train(self) -> Tensor:
        if self.state.commits:
            self.state.restore()
        restored = self.state.step
        for _ in range(STEPS):
            self.state.step += 1
            self.state.weights += 1
            self.state.commit()
        return torch.tensor([restored, self.state.commits, *self.state.weights])


@case
def committed() -> Case:
    return Committed()


class Checked(Case):
    """The ranks compare their replicas in the same step."""

    def __init__(self) -> None:
        self.model = network()

    def train(self) -> Tensor:
        for _ in range(STEPS * 3):
            nbdist.check_replicas(self.model, every=2)
        return torch.zeros(1)


@case
def checked() -> Case:
    return Checked()


class Grown(Case):
    """Process sets and optimizers that a cell makes each time that it runs."""

    def train(self) -> Tensor:
        hvd.init()
        pair = hvd.add_process_set([0, 1])
        total = torch.zeros(1)
        if pair.included():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair)
        hvd.remove_process_set(pair)
        loop = horovod(network())
        return torch.cat([loop.train(), hvd.broadcast(total, 0).double()])


@case
def grown() -> Case:
    return Grown()


class InKeras(Case):
    def __init__(self) -> None:
        import nbdist.keras as hvd_keras

        hvd_keras.init()
        import keras

        keras.utils.set_random_seed(1)
        width = keras.layers.Input((4,))
        layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]
        self.model = keras.Sequential([width, *layers])
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
        self.model.compile(optimizer, "mse")
        self.first = self.model.get_weights()

    def reset(self) -> None:
        self.model.set_weights(self.first)

    def train(self) -> Tensor:
        x = torch.arange(48.0).view(12, 4) / 48 + nbdist.rank()
        self.model.fit(x, x.sum(1), batch_size=4, epochs=1, verbose=0, shuffle=False)
        weights = [torch.as_tensor(each).flatten() for each in self.model.get_weights()]
        return torch.cat(weights).double()


def in_keras() -> Case:
    return InKeras()
