"""The logged values in Weights & Biases and MLflow, by their own clients."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from nbdist.errors import UsageError
from nbdist.telemetry.collector import Collector
from nbdist.telemetry.trackers import MlflowRun, WandbRun
from tests.processes import wait_until
from tests.telemetry.test_event_files import log

WITHIN_S = 60.0


class SpyRun:
    """A run of wandb that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.metrics: list[tuple[str, str]] = []
        self.is_finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.is_finished = True


def test_values_of_one_step_are_one_row_of_wandb() -> None:
    pytest.importorskip("wandb")
    collector, run = Collector(), SpyRun()
    log(collector, 0, 0, 0.5, 0.25)
    log(collector, 1, 0, 1.5)
    stream = WandbRun(collector, run)
    log(collector, 1, 1, 3.0)
    assert stream.close(WITHIN_S)
    assert run.metrics == [("*", "step")]
    assert run.rows == [
        {"step": 0, "loss/rank0": 0.5, "loss/rank1": 1.5},
        {"step": 1, "loss/rank0": 0.25},
        {"step": 10, "loss/rank1": 3.0},
    ]
    assert not run.is_finished, "it is the user's"


def test_a_run_of_wandb_has_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    collector = Collector()
    log(collector, 0, 0, 0.5, 0.25)
    stream = WandbRun(collector, mode="offline", dir=str(tmp_path), project="test")
    log(collector, 1, 0, 3.0)
    assert stream.close(WITHIN_S)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # wandb's service may write the file after the end of its run.
    expected = (b"loss/rank0", b"0.25", b"loss/rank1")
    wait_until(lambda: all(each in file.read_bytes() for each in expected), WITHIN_S)
    wandb.teardown()  # a later test has other variables, which are read once


def test_a_run_of_mlflow_has_the_values_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # as many users have it
    mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
    collector = Collector()
    log(collector, 0, 0, 0.5, 0.25)
    stream = MlflowRun(collector)
    log(collector, 1, 0, *map(float, range(1500)))
    assert stream.close(WITHIN_S)
    client, run = mlflow.MlflowClient(), stream.run.info.run_id

    def history(name: str) -> list[tuple[int, float, int]]:
        found = client.get_metric_history(run, name)
        return [(each.step, each.value, each.timestamp) for each in found]

    assert history("loss/rank0") == [(0, 0.5, 100_000), (1, 0.25, 101_000)]
    assert len(history("loss/rank1")) == 1500
    assert client.get_run(run).info.status == "FINISHED"


class FailingRun(SpyRun):
    def log(self, row: dict[str, float]) -> None:
        raise ConnectionError("the server is away")


def test_a_client_that_fails_ends_the_stream_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("wandb")
    collector = Collector()
    log(collector, 0, 0, 0.5)
    with caplog.at_level(logging.WARNING):
        stream = WandbRun(collector, FailingRun())
        stream._thread.join(WITHIN_S)
    assert "Weights & Biases: the server is away" in caplog.text
    assert collector._followers == []
    log(collector, 0, 1, 0.5)
    assert stream.close(WITHIN_S)


@pytest.mark.parametrize(
    ("make", "package"), [(WandbRun, "wandb"), (MlflowRun, "mlflow")]
)
def test_a_missing_package_is_named(
    make: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"pip install {package}"):
        make(Collector())
