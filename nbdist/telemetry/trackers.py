"""Passes the logged values to Weights & Biases and to MLflow, by their own clients.

A metric of a rank has a name such as "loss/rank0".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nbdist.errors import UsageError
from nbdist.telemetry.collector import Collector
from nbdist.telemetry.value_stream import Value, ValueStream

__all__ = ["MlflowRun", "WandbRun"]

MOST_AT_ONCE = 1000
"""The most values in one request, which MLflow demands."""


class WandbRun(ValueStream):
    """Logs values to a run of Weights & Biases, over their steps.

    Args:
        run: A run that is not ended here; None begins one, and ends it at `close`.
        options: Arguments of `wandb.init`.

    Raises:
        UsageError: wandb is not installed.
    """

    description = "Weights & Biases"

    def __init__(self, collector: Collector, run: Any = None, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                "to_wandb() needs wandb, which is not installed: pip install wandb"
            ) from error
        self._is_own = run is None
        self.run: Any = wandb.init(**options) if run is None else run
        # wandb's own step never decreases, and that of a rank that is behind does.
        self.run.define_metric("*", step_metric="step")
        super().__init__(collector)

    def write(self, values: Sequence[Value]) -> None:
        rows: dict[int, dict[str, float]] = {}
        for each in values:
            rows.setdefault(each.step, {"step": each.step})[_name(each)] = each.value
        for step in sorted(rows):
            self.run.log(rows[step])

    def finish(self) -> None:
        if self._is_own:
            self.run.finish()


class MlflowRun(ValueStream):
    """Logs values to a run of MLflow.

    Args:
        run: A run of MLflow, which is not ended here; None takes the active one, or
            begins one and ends it at `close`.

    Raises:
        UsageError: MLflow is not installed.
    """

    description = "MLflow"

    def __init__(self, collector: Collector, run: Any = None) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise UsageError(
                "to_mlflow() needs MLflow, which is not installed: pip install mlflow"
            ) from error
        self._client = mlflow.MlflowClient()
        self._metric: Any = mlflow.entities.Metric
        chosen = run or mlflow.active_run()
        self._is_own = chosen is None
        # `start_run` would make it the active one, and end it with the process.
        self.run: Any = chosen or self._client.create_run("0")
        super().__init__(collector)

    def write(self, values: Sequence[Value]) -> None:
        for some in _parts(values):
            metrics = [
                self._metric(_name(each), each.value, int(each.time * 1e3), each.step)
                for each in some
            ]
            self._client.log_batch(self.run.info.run_id, metrics)

    def finish(self) -> None:
        if self._is_own:
            self._client.set_terminated(self.run.info.run_id)


def _name(value: Value) -> str:
    return f"{value.metric}/rank{value.rank}"


def _parts(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    for first in range(0, len(values), MOST_AT_ONCE):
        yield values[first : first + MOST_AT_ONCE]
