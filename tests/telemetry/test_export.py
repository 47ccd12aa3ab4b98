"""The logged values as a DataFrame, CSV or Parquet."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import pandas as pd
import pytest

from nbdist.errors import UsageError
from nbdist.telemetry.collector import Collector
from nbdist.telemetry.export import COLUMNS, data_frame, rows, save
from nbdist.wire import Batch, Sample


@pytest.fixture
def collector() -> Collector:
    """Two ranks that have logged three losses; rank 1 also a learning rate."""
    made = Collector(capacity=4)
    for rank in (1, 0):
        records = [
            Sample(rank, step, 100.0 + step, {"loss": 1.0 / (1 + step + rank)})
            for step in range(3)
        ]
        if rank == 1:
            records.append(Sample(rank, 3, 103.0, {"lr": math.nan}))
        made.receive(Batch(rank, f"source{rank}", 0, 0, tuple(records)))
    return made


def test_a_row_for_each_metric_rank_and_step(collector: Collector) -> None:
    found = list(rows(collector.snapshot()))
    assert [row[:3] for row in found] == [
        *(("loss", 0, step) for step in range(3)),
        *(("loss", 1, step) for step in range(3)),
        ("lr", 1, 3),
    ]
    assert found[1] == ("loss", 0, 1, 101.0, 0.5, 0.5, 0.5)


def test_a_long_history_has_means_and_ranges() -> None:
    collector = Collector(capacity=4)
    records = [Sample(0, step, float(step), {"x": float(step)}) for step in range(8)]
    collector.receive(Batch(0, "source", 0, 0, tuple(records)))
    found = list(rows(collector.snapshot()))
    assert len(found) <= 4
    name, rank, step, _, value, low, high = found[-1]
    assert (name, rank) == ("x", 0)
    assert step <= low <= value <= high == 7.0


def test_a_data_frame(collector: Collector) -> None:
    table = data_frame(collector)
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == 7
    assert table["rank"].dtype == table["step"].dtype == "int64"
    best = table[table.metric == "loss"].groupby("rank").value.min()
    assert best.to_dict() == {0: pytest.approx(1 / 3), 1: 0.25}
    assert set(data_frame(collector, ["lr"])["metric"]) == {"lr"}
    assert list(data_frame(Collector()).columns) == list(COLUMNS)


def test_an_unknown_metric_is_refused_with_the_known_ones(collector: Collector) -> None:
    with pytest.raises(UsageError, match="has logged 'los': the metrics are loss, lr"):
        data_frame(collector, ["loss", "los"])


def test_without_pandas_the_error_says_what_to_do(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        data_frame(collector)
    assert save(collector, tmp_path / "run.csv") == 7


def test_a_csv_file_has_every_digit(collector: Collector, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    assert save(collector, path, ["lr", "loss"]) == 7
    assert save(collector, path, ["loss"]) == 6
    with path.open(newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == COLUMNS
    assert [float(line[4]) for line in lines] == [
        row[4] for row in rows(collector.snapshot(), ["loss"])
    ]
    save(collector, path)
    assert math.isnan(pd.read_csv(path).value.iloc[-1])
    assert [each.name for each in tmp_path.iterdir()] == ["run.csv"]


def test_parquet_names_what_is_missing(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(*_: object, **__: object) -> None:
        raise ImportError("Unable to find a usable engine")

    path = tmp_path / "run.parquet"
    path.write_text("kept")
    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", no_engine)
        with pytest.raises(UsageError, match="pip install pyarrow"):
            save(collector, path)
    assert path.read_text() == "kept"
    monkeypatch.setattr(
        pd.DataFrame, "to_parquet", lambda table, file, index: file.write(b"PAR1")
    )
    assert save(collector, path) == 7
    assert path.read_bytes() == b"PAR1"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("run.txt", "expected a .csv or .parquet file"),
        ("absent/run.csv", "does not exist"),
    ],
)
def test_a_wrong_file_name_is_refused(
    collector: Collector, tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        save(collector, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
