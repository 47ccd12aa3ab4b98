"""Runs a file of upstream cases, and compares the outcomes with the exceptions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fetch import folder_of
from run_cases import ROOT, Case

__all__ = ["Report", "run_file"]

RUNNER = Path(__file__).with_name("run_cases.py")
RESULTS = ROOT / "out" / "upstream"


@dataclass(frozen=True)
class Report:
    """The outcomes of the cases of a file."""

    cases: Mapping[str, Case]

    def unexpected(
        self, exceptions: Mapping[str, str], also_fail: Sequence[str]
    ) -> str:
        """A line for each case whose outcome is not as the exceptions say; "" if none.

        Args:
            exceptions: The reason for each case that fails.
            also_fail: Cases that fail on gloo too, and are judged as neither.
        """
        lines = []
        for name, case in self.cases.items():
            if case.kind == "failed" and name not in (*exceptions, *also_fail):
                lines.append(f"{name} fails:\n{case.reason}")
            elif case.kind != "failed" and name in exceptions:
                lines.append(f"{name} {case.kind}: remove it from the exceptions")
        missing = sorted(set(exceptions) - set(self.cases))
        return "\n".join([*lines, *(f"{name} does not exist" for name in missing)])

    @property
    def failed(self) -> list[str]:
        return [name for name, case in self.cases.items() if case.kind == "failed"]


def run_file(
    suite: str, file: str, *options: str, only: str = "", timeout_s: float
) -> Report:
    """Run the cases of a file. The outcomes are also written to out/upstream.

    Args:
        suite: "pytorch" or "horovod".
        file: Its path in the suite's folder.
        options: Options of `run_cases`.
        only: A regular expression for the names of the cases.
        timeout_s: For all cases together.
    """
    path = folder_of(suite) / file
    command = [sys.executable, str(RUNNER), suite, str(path), *options, "--only", only]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0, done.stdout[-4000:]
    assert lines, f"{file} has no case that {only!r} matches"
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = "-".join([suite, *path.with_suffix("").parts[-2:], *options])
    (RESULTS / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return Report({case.name: case for case in (Case(**json.loads(x)) for x in lines)})


def exactly(names: Sequence[str]) -> str:
    """A regular expression that matches these names and no other."""
    return "^(" + "|".join(map(re.escape, names)) + ")$"


JOBS = f"--jobs={max(1, (os.cpu_count() or 1) // 2)}"
