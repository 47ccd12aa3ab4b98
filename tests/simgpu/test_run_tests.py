"""A test runs on each number of GPUs of its marker, or the run fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import run_tests
from run_tests import Outcome

MARKED, OTHER = "a.py::marked", "a.py::other"


def made(runs: dict[int, Outcome], patch: pytest.MonkeyPatch) -> Any:
    """The tests that were run on each number of GPUs, and what `run_seed` returns."""
    asked = {}

    def run(
        out: Path, cards: int, seed: int, tests: list[str], left_s: float, marked: str
    ) -> Outcome:
        assert marked == "gpu"
        asked[cards] = tests
        return runs[cards]

    patch.setattr(run_tests, "run", run)
    end = time.monotonic() + 1000
    return asked, *run_tests.run_seed(1, Path(), [1, 2, 4], ["a.py"], end, "gpu")


def test_a_marked_test_runs_on_each_of_its_numbers(monkeypatch: pytest.MonkeyPatch):
    runs = {
        1: Outcome([MARKED], [], [OTHER], {MARKED: {1, 4}}, ""),
        2: Outcome([OTHER], [], [], {}, ""),
        4: Outcome([MARKED], [], [], {MARKED: {1, 4}}, ""),
    }
    asked, lines, is_good = made(runs, monkeypatch)
    assert asked == {1: ["a.py"], 2: [OTHER], 4: [MARKED]}
    assert is_good, lines


@pytest.mark.parametrize(("ending", "fails"), [("", True), (run_tests.LATE, False)])
def test_a_marked_test_that_was_skipped_fails_a_whole_run(
    ending: str, fails: bool, monkeypatch: pytest.MonkeyPatch
):
    runs = {
        1: Outcome([OTHER], [], [MARKED], {MARKED: {2}}, ""),
        2: Outcome([], [], [MARKED], {MARKED: {2}}, ending),
        4: Outcome([], [], [MARKED], {MARKED: {2}}, ""),
    }
    _, lines, is_good = made(runs, monkeypatch)
    assert is_good != fails
    assert (f"    {MARKED} has not run on 2 GPUs" in lines) == fails


def test_the_marker_is_in_pytests_report(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuite><testcase classname="tests.a" name="x"><properties>'
        '<property name="gpus" value="1 2"/></properties></testcase></testsuite>'
    )
    assert run_tests._read(report, "").marked == {"tests/a.py::x": {1, 2}}
