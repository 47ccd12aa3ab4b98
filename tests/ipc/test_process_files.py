"""The files through which a rank's process reports are written and read."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from nbdist.ipc.process_files import Process, describe_exit, read_exit_report


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-signal.SIGKILL, "SIGKILL"),
        (-(signal.SIGRTMIN + 1), f"signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_an_exit_code_is_described_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_an_exit_is_reported_in_the_reserved_space(tmp_path: Path) -> None:
    process = Process(tmp_path, 2, 1)
    assert read_exit_report(tmp_path, process.name) is None
    process.reserve_exit_report()
    size = process.path("exit").stat().st_size
    assert read_exit_report(tmp_path, process.name) is None
    process.report_exit(-signal.SIGTERM)
    assert read_exit_report(tmp_path, process.name) == "SIGTERM"
    assert process.path("exit").stat().st_size == size


def test_a_stage_replaces_the_one_before(tmp_path: Path) -> None:
    process = Process(tmp_path, 0, 0)
    process.report_stage("loading torch")
    process.report_stage("registering")
    assert json.loads((tmp_path / "rank0.stage").read_text())["stage"] == "registering"
    assert list(tmp_path.iterdir()) == [tmp_path / "rank0.stage"]


def test_a_failure_with_text_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    Process(tmp_path, 0, 0).report_failure(ValueError("\ud800"))
    assert "ValueError: \\ud800" in (tmp_path / "rank0.failed").read_text()
