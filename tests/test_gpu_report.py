"""The file that `make gpu` writes, with commands that need no GPU."""

from __future__ import annotations

import re
import sys

from tests.gpu_report import BENCHMARKS, ROOT, TESTS, Part, report, run


def part(title: str, code: str, minutes: float = 1.0) -> Part:
    return Part(title, (sys.executable, "-c", code), minutes)


LONG = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:  # as pytest does
    print("test_b was interrupted")
"""


def test_a_part_that_fails_does_not_stop_the_others() -> None:
    parts = [
        part("good", "print('3 passed in 1.0s')"),
        part("bad", "raise SystemExit('1 failed')"),
        part("long", LONG, 0.05),
        Part("missing", ("no-such-program",), 1.0),
    ]
    text = report([run(each) for each in parts])
    assert "| good | passed | 0 s | 3 passed in 1.0s |" in text
    assert "| bad | exit code 1 | 0 s | 1 failed |" in text
    assert "| long | ended after 0.05 minutes | 3 s | test_b was interrupted |" in text
    assert "| missing | not started: " in text
    assert text.count("\n## ") == 4


def test_a_long_output_is_cut_at_its_beginning() -> None:
    text = report([run(part("much", "print('x' * 50_000 + 'the end')"))])
    assert re.search(r"\(\d+ characters before this are left out\)", text)
    assert "the end" in text
    assert len(text) < 25_000


def test_every_path_of_a_command_exists() -> None:
    for each in (*TESTS, *BENCHMARKS):
        for word in each.command[1:]:
            path = word.removeprefix("--ignore=")
            if path.startswith(("tests", "benchmarks/")):
                assert (ROOT / path).exists(), path
