"""TensorBoard's event files of the logged values."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nbdist.errors import UsageError
from nbdist.telemetry.collector import Collector
from nbdist.telemetry.event_files import EventFiles
from nbdist.wire import Batch, Sample

WITHIN_S = 30.0


def log(collector: Collector, rank: int, number: int, *values: float) -> None:
    """Have the collector receive a batch of a rank, with one loss for each step."""
    first = number * 10
    records = [
        Sample(rank, first + step, 100.0 + step, {"loss": value})
        for step, value in enumerate(values)
    ]
    collector.receive(Batch(rank, f"source{rank}", number, 0, tuple(records)))


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """(step, time, value) of each loss in a rank's folder."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(each.step, each.wall_time, each.value) for each in found.Scalars("loss")]


def test_earlier_and_later_values_of_each_rank(tmp_path: Path) -> None:
    collector = Collector()
    log(collector, 0, 0, 0.5, 0.25)
    files = EventFiles(collector, tmp_path / "runs" / "first")
    log(collector, 0, 1, 0.125)
    log(collector, 1, 0, 3.0, math.nan)
    assert files.close(WITHIN_S)
    log(collector, 1, 1, 7.0)
    assert files.close(0.0)
    folder = tmp_path / "runs" / "first"
    assert sorted(each.name for each in folder.iterdir()) == ["rank0", "rank1"]
    assert losses(folder / "rank0") == [
        (0, 100.0, 0.5), (1, 101.0, 0.25), (10, 100.0, 0.125),
    ]  # fmt: skip
    (first, (step, _, value)) = losses(folder / "rank1")
    assert first == (0, 100.0, 3.0)
    assert step == 1
    assert math.isnan(value)


def test_no_value_is_lost_or_repeated_when_it_begins_during_a_training(
    tmp_path: Path,
) -> None:
    collector = Collector()
    count = 200

    def train() -> None:
        for number in range(count):
            log(collector, 0, number, float(number))

    training = threading.Thread(target=train)
    training.start()
    files = EventFiles(collector, tmp_path)
    training.join()
    assert files.close(WITHIN_S)
    found = [value for _, _, value in losses(tmp_path / "rank0")]
    assert found == [float(number) for number in range(count)]


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(UsageError, match=r"--logdir .*taken: the folder cannot be ma"):
        EventFiles(Collector(), tmp_path / "taken")


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "tensorboard.summary.writer.event_file_writer", None
    )
    with pytest.raises(UsageError, match="pip install tensorboard"):
        EventFiles(Collector(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_full_disk_ends_the_files_and_not_the_collector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector()
    files = EventFiles(collector, tmp_path)

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    files._open = full
    log(collector, 0, 0, 1.0)
    files._thread.join(WITHIN_S)
    assert "No more values are written" in caplog.text
    log(collector, 0, 1, 2.0)
    assert collector.history("loss")[0][1].tolist() == [1.0, 2.0]
    assert files.close(0.0)
