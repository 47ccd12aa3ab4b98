"""Keras 3 over torch on ranks, and `nbdist.keras` without Keras."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from ranks import failures, launch

from nbdist import Cluster
from nbdist.errors import CellError

CASES_FILE = str(Path(__file__).with_name("keras_cases.py"))
SCRIPT = Path(__file__).with_name("keras_digits.py")
CASES = [
    "equals_one_process_on_the_full_batch",
    "gradients_are_reduced_while_backward_runs",
    "a_step_that_changes_gradients_is_right_or_refused",
    "a_wrapped_optimizer_keeps_its_state",
    "compressed_and_summed", "variables_are_broadcast",
    "ranks_with_different_weights_become_equal", "metrics_are_averaged",
    "the_learning_rate_warms_up", "one_rank_saves", "a_strategy_drives_fit",
    "a_strategy_divides_every_epoch_in_a_new_order",
    "a_pickled_model_keeps_the_state_of_its_optimizer",
    "a_state_restores_a_model_with_its_optimizer",
]  # fmt: skip


@cache
def outcomes() -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    patience = {"NBDIST_COLLECTIVE_TIMEOUT": "30", "CUDA_VISIBLE_DEVICES": ""}
    return launch(3, CASES_FILE, "run_all_cases", deadline_s=150, environment=patience)


def test_every_case_is_listed() -> None:
    assert list(outcomes()[0]) == CASES


@pytest.mark.parametrize("case", CASES)
def test_keras(case: str) -> None:
    found = failures(outcomes(), case)
    assert not found, found


def test_a_keras_script_trains_in_a_cell(cluster: Cluster) -> None:
    result = cluster.execute(SCRIPT.read_text(encoding="utf-8"))
    printed = result[0].stdout
    found = re.search(r"test accuracy: ([\d.]+)%", printed)
    assert found is not None, printed
    assert float(found[1]) > 88
    assert "all ranks alike: True" in printed
    assert "saved: rank-0-1.keras rank-0-2.keras rank-0-3.keras rank-0-4" in printed
    assert "the learning rate has reached 0.008" in printed


TRAINING = """
import nbdist.keras as hvd
import keras, numpy as np

hvd.init()
keras.utils.set_random_seed(1)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
model.compile(loss="mse", optimizer=optimizer)
x, y = np.random.default_rng(0).normal(size=(2, 16, 5))
model.fit(x, y[:, :2], epochs=2, verbose=0)
"""
GOES_ON = """
hvd.init()
assert model.optimizer is optimizer
model.fit(x, y[:, :2], epochs=1, verbose=0)
moments = [float(np.abs(v.numpy()).sum()) for v in optimizer.variables]
weights = [float(np.abs(w).sum()) for w in model.get_weights()]
"""


def test_a_rank_that_is_replaced_gets_the_state_of_its_optimizer(
    cluster: Cluster,
) -> None:
    cluster.execute(TRAINING)
    cluster.replace([2])
    cluster.execute(GOES_ON)
    moments, weights = cluster["moments"], cluster["weights"]
    assert moments == [moments[0]] * 4
    assert weights == [weights[0]] * 4
    assert moments[0][0] == 3  # the iterations: two before the death, one after


FAILS = """
from keras import layers

class Net(keras.Sequential):
    def train_step(self, data):
        step = int(self.optimizer.iterations)
        if step == fails_at:
            self.layers[0].kernel.value.register_hook(fail)
        return super().train_step(data)

def fail(gradient):
    if rank == 1 and fails_at is not None:
        raise ValueError("a gradient of rank 1")

hvd.init()
fails_at = 2
net = Net([keras.Input((5,)), layers.Dense(600), layers.Dense(600), layers.Dense(2)])
net.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
net.fit(x, y[:, :2], batch_size=4, verbose=0)
"""
FITS_AGAIN = """
fails_at = None
net.set_weights(hvd.broadcast_object(net.get_weights()))
net.fit(x, y[:, :2], batch_size=4, verbose=0)
weights = [float(np.abs(w).sum()) for w in net.get_weights()]
"""


def test_a_step_that_fails_while_gradients_are_reduced_is_forgotten(
    cluster: Cluster,
) -> None:
    cluster.execute(TRAINING)
    with pytest.raises(CellError, match="a gradient of rank 1"):
        cluster.execute(FAILS, timeout_s=60)
    cluster.execute(FITS_AGAIN, timeout_s=60)
    weights = cluster["weights"]
    assert weights == [weights[0]] * 4


def test_nbdist_loads_without_keras() -> None:
    program = """
import sys
sys.modules["keras"] = None  # as if it were not installed
import nbdist.keras
assert "DistributedOptimizer" in dir(nbdist.keras)
print({"torch", "mpi4py"} & sys.modules.keys())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


def test_a_backend_other_than_torch_is_refused() -> None:
    program = """
import os, sys, types
keras = types.ModuleType("keras")
keras.backend = types.SimpleNamespace(backend=lambda: "jax")
sys.modules["keras"] = keras
from nbdist.training.keras_models import check_backend
try:
    check_backend()
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "Keras uses the backend jax: set KERAS_BACKEND=torch" in done.stdout
