"""Cases of Keras. `test_keras.py` runs this file on ranks."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import nbdist.keras as hvd  # isort: skip - it chooses Keras's backend
import keras

from nbdist.errors import UsageError
from nbdist.horovod.gradients import NamedReduction
from nbdist.ipc import serialization
from nbdist.strategies import Mirrored, MultiWorkerMirrored, OneDevice
from nbdist.training.elastic.state import State
from nbdist.training.strategies import keras_fit

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def run_all_cases() -> dict[str, str | None]:
    sys.path.append(str(Path(__file__).parent.parent / "horovod"))
    from horovod_cases import run_cases

    return run_cases(CASES)


def model(optimizer: Any, seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    net = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(2)]
    )
    net.compile(loss="mse", optimizer=optimizer, metrics=["mae"])
    return net


def samples(count: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(3)
    return draw.normal(size=(count, 5)), draw.normal(size=(count, 2))


def mine(rows: Any) -> Any:
    return np.split(rows, hvd.size())[hvd.rank()]


def assert_equal(net: Any, reference: Any, rtol: float = 2e-5) -> None:
    for got, expected in zip(net.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol / 10)


@case
def equals_one_process_on_the_full_batch() -> None:
    for make in (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.AdamW(0.01, clipnorm=0.1),
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    ):
        optimizer = hvd.DistributedOptimizer(make())
        assert isinstance(optimizer, type(make()))
        net, reference = model(optimizer), model(make())
        x, y = samples(8 * hvd.size())
        for _ in range(4):
            net.train_on_batch(mine(x), mine(y))
            reference.train_on_batch(x, y)
        assert_equal(net, reference)


@case
def gradients_are_reduced_while_backward_runs() -> None:
    x, y = samples(8 * hvd.size())
    for owner, wrap, scope in (
        (NamedReduction, hvd.DistributedOptimizer, contextlib.nullcontext()),
        (keras_fit._Mean, lambda optimizer: optimizer, Mirrored().scope()),
    ):
        with scope:
            net = keras.Sequential(
                [
                    keras.Input((5,)),
                    keras.layers.Dense(600, "tanh"),
                    keras.layers.Dense(600),  # 1.4 MB, more than the first bucket
                    keras.layers.Dense(2),
                ]
            )
            net.compile(loss="mse", optimizer=wrap(keras.optimizers.SGD(0.1)))
        seen: list[object] = []
        begin: Any = owner.begin

        def begun(
            self: Any, index: int, bucket: Any, begin: Any = begin, seen: Any = seen
        ) -> Any:
            seen.append(index)
            return begin(self, index, bucket)

        net.train_on_batch(mine(x), mine(y))  # the ranks agree on the buckets
        net.layers[0].kernel.value.register_hook(
            lambda _, seen=seen: seen.append("end")
        )
        with mock.patch.object(owner, "begin", begun):
            net.train_on_batch(mine(x), mine(y))
        assert seen == [0, "end", 1], seen


class OwnStep(keras.Sequential):  # type: ignore[misc]
    """Halves the gradients before they are applied."""

    scales = True
    in_place = False

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        if self.scales:
            loss = self.optimizer.scale_loss(loss)
        loss.backward()
        variables = list(self.trainable_weights)
        gradients = [each.value.grad for each in variables]
        if self.in_place:
            torch._foreach_mul_(gradients, 0.5)
        else:
            gradients = [gradient * 0.5 for gradient in gradients]
        with torch.no_grad():
            self.optimizer.apply(gradients, variables)
        return {"loss": loss.detach()}


@case
def a_step_that_changes_gradients_is_right_or_refused() -> None:
    x, y = samples(8 * hvd.size())

    def own(optimizer: Any) -> Any:
        net = model(optimizer)
        made = OwnStep(net.layers)
        made.compile(loss="mse", optimizer=optimizer)
        return made

    net = own(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    reference = model(keras.optimizers.SGD(0.05))
    net.scales = False
    for _ in range(3):
        net.train_on_batch(mine(x), mine(y))
        reference.train_on_batch(x, y)
    assert_equal(net, reference)
    net.scales = True
    for net.in_place in (False, True):
        with pytest.raises(UsageError, match="clipnorm"):
            net.train_on_batch(mine(x), mine(y))
    assert_equal(net, reference)
    net.scales = False
    net.train_on_batch(mine(x), mine(y))  # a refused step is forgotten
    reference.train_on_batch(x, y)
    assert_equal(net, reference)


@case
def a_wrapped_optimizer_keeps_its_state() -> None:
    reference = model(keras.optimizers.Adam(0.01))
    x, y = samples(8 * hvd.size())
    reference.train_on_batch(x, y)
    net = model(hvd.DistributedOptimizer(reference.optimizer))
    net.set_weights(reference.get_weights())
    again = hvd.DistributedOptimizer(net.optimizer)  # as in a cell that is run again
    assert type(again)._nbdist_base is type(reference.optimizer)
    assert int(again.iterations) == 1
    for own, other in zip(again.variables, reference.optimizer.variables, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())


@case
def compressed_and_summed() -> None:
    x, y = samples(8 * hvd.size())
    for options, rate in (
        ({"compression": hvd.Compression.fp16}, 0.1),
        ({"op": hvd.Sum}, 0.1 / hvd.size()),
    ):
        net = model(hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options))
        reference = model(keras.optimizers.SGD(0.1))
        for _ in range(3):
            net.train_on_batch(mine(x), mine(y))
            reference.train_on_batch(x, y)
        assert_equal(net, reference, rtol=1e-2)
    with pytest.raises(UsageError, match=r"hvd\.Average or hvd\.Sum"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum)


@case
def variables_are_broadcast() -> None:
    root = hvd.size() - 1
    x, y = samples(8)
    net = model(keras.optimizers.Adam(0.1), seed=hvd.rank())
    reference = model(keras.optimizers.Adam(0.1), seed=root)
    reference.train_on_batch(x, y)
    reference.train_on_batch(x + root, y)
    net.train_on_batch(x, y)
    net.train_on_batch(x + hvd.rank(), y)
    hvd.broadcast_global_variables(root, net)
    assert_equal(net, reference)
    for own, other in zip(
        net.optimizer.variables, reference.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-5, atol=1e-7)


@case
def ranks_with_different_weights_become_equal() -> None:
    x, y = samples(16 * hvd.size())
    net = model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), seed=hvd.rank())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    net.fit(mine(x), mine(y), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    everybody = hvd.allgather_object(net.get_weights())
    for weights in everybody:
        for one, other in zip(weights, everybody[0], strict=True):
            np.testing.assert_array_equal(one, other)


@case
def metrics_are_averaged() -> None:
    logs = {"loss": float(hvd.rank()), "b": 1.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (hvd.size() - 1) / 2, "b": 1.0}


class Rates(keras.callbacks.Callback):
    """Records the learning rate and momentum of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self.seen.append((float(optimizer.learning_rate), optimizer.momentum))


@case
def the_learning_rate_warms_up() -> None:
    size, rates = hvd.size(), Rates()
    net = model(keras.optimizers.SGD(0.5, momentum=0.9))
    x, y = samples(16)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2, verbose=1)
    staircase = hvd.callbacks.LearningRateScheduleCallback(
        0.5, lambda epoch: 0.1**epoch, start_epoch=3
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        history = net.fit(
            x,
            y,
            batch_size=4,
            epochs=5,
            verbose=0,
            callbacks=[warmup, staircase, rates],
        )
    ramp = [0.5 / size * ((step + 1) / 4 * (size - 1) / 2 + 1) for step in range(8)]
    expected = [*ramp, *[0.5] * 4, *[0.5e-3] * 4, *[0.5e-4] * 4]
    got = [rate for rate, _ in rates.seen]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"][-1], 0.5e-4, rtol=1e-5)
    # Momentum is scaled for one batch after a change (here to at most 1).
    assert rates.seen[3][1] == pytest.approx(min(1, 0.9 * ramp[3] / ramp[2]), rel=1e-4)
    assert rates.seen[12][1] == pytest.approx(0.9e-3, rel=1e-4)
    assert rates.seen[13][1] == net.optimizer.momentum == 0.9
    assert ("has reached 0.5" in printed.getvalue()) == (hvd.rank() == 0)


@case
def one_rank_saves() -> None:
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    x, y = samples(8)
    net = model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    saver = hvd.callbacks.ModelCheckpoint(folder / f"{hvd.rank()}.keras")
    net.fit(x, y, epochs=2, verbose=0, callbacks=[saver])
    hvd.barrier()
    assert [path.name for path in folder.iterdir()] == ["0.keras"]
    loaded = keras.models.load_model(folder / "0.keras")
    assert_equal(loaded, net)
    assert not hasattr(type(loaded.optimizer), "_nbdist_base")


@case
def a_strategy_drives_fit() -> None:
    x, y = samples(20)  # the last batch of 8 has parts of 3, 3 and 2
    weights = np.linspace(0.5, 1.5, 20)
    for strategy, options in (
        (Mirrored(), {}),
        (MultiWorkerMirrored(communication="RING"), {"sample_weight": weights}),
        (OneDevice(), {}),
    ):
        with strategy.scope():
            # Each rank draws its own weights: fit sends those of rank 0.
            alone = isinstance(strategy, OneDevice)
            net = model(keras.optimizers.Adam(0.01), seed=1 if alone else hvd.rank())
        reference = model(keras.optimizers.Adam(0.01), seed=1 if alone else 0)
        how = {"batch_size": 12, "epochs": 3, "shuffle": False, "verbose": 0}
        seen = net.fit(x, y, **how, **options)
        reference.fit(x, y, **how, **options)
        assert_equal(net, reference, rtol=2e-4)
        everybody = hvd.allgather_object(seen.history["loss"])
        assert all(losses == everybody[0] for losses in everybody)
    assert not hasattr(model(keras.optimizers.SGD(0.1)), "_nbdist_adopt")


@case
def a_strategy_divides_every_epoch_in_a_new_order() -> None:
    x, y = np.arange(24.0)[:, None] * np.ones((1, 5)), np.zeros((24, 2))
    batches: list[list[float]] = []
    with Mirrored().scope():
        net = model(keras.optimizers.SGD(0.0))
    step = net.train_step

    def watched(data: Any) -> Any:
        batches.append([float(row) for row in data[0][:, 0]])
        return step(data)

    net.train_step = watched
    net.fit(x, y, batch_size=6, epochs=2, verbose=0, validation_split=0.25)
    everybody = hvd.allgather_object(batches)
    epochs = [
        [row for each in everybody for part in each[i : i + 3] for row in part]
        for i in (0, 3)
    ]
    for epoch in epochs:  # all but the last quarter, each once
        assert sorted(epoch) == [float(row) for row in range(18)]
    assert epochs[0] != epochs[1]
    with pytest.raises(UsageError, match="class_weight with 20 samples in batches"):
        net.fit(x[:20], y[:20], batch_size=12, class_weight={0: 1.0})


@case
def a_pickled_model_keeps_the_state_of_its_optimizer() -> None:
    x, y = samples(8 * hvd.size())
    nets = [model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))]
    with Mirrored().scope():
        nets.append(model(keras.optimizers.Adam(0.01)))
    nets.append(model(keras.optimizers.SGD(0.1, momentum=0.9)))
    for net in nets:
        net.train_on_batch(mine(x), mine(y))
        for names in (("net", "optimizer"), ("optimizer", "net")):
            values = {"net": net, "optimizer": net.optimizer}
            packed = serialization.dumps_named({name: values[name] for name in names})
            copied = serialization.loads_named(packed)
            twin = copied["net"]
            assert copied["optimizer"] is twin.optimizer
            own, other = net.optimizer.variables, twin.optimizer.variables
            for one, two in zip(own, other, strict=True):
                np.testing.assert_array_equal(one.numpy(), two.numpy())
            assert ("fit" in vars(twin)) == ("fit" in vars(net))
        before = net.get_weights()
        net.train_on_batch(mine(x), mine(y))
        twin.train_on_batch(mine(x), mine(y))
        assert_equal(twin, net)
        assert not np.array_equal(before[0], net.get_weights()[0])


@case
def a_state_restores_a_model_with_its_optimizer() -> None:
    x, y = samples(8)
    net, fresh = (model(keras.optimizers.Adam(0.01), seed=seed) for seed in (1, 2))
    net.train_on_batch(x, y)
    state = State(model=net)
    state.commit()
    weights = net.get_weights()
    moments = [variable.numpy().copy() for variable in net.optimizer.variables]
    net.train_on_batch(x, y)
    state.restore()
    other = State(model=fresh)
    other._load_object("model", state._committed.values["model"])
    for each in (net, fresh):
        for one, two in zip(each.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, two)
        for variable, value in zip(each.optimizer.variables, moments, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
