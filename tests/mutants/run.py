"""Tries the deliberate faults of `cpu_mutants.py`, and prints which were caught.

Each fault's tests run in a process that is forked after the imports of torch, IPython
and the like, so that unit tests take a few seconds. Without `--only`, the table in
CONTRIBUTING.md is written.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.mutants.cpu_mutants import KINDS  # noqa: E402
from tests.mutants.mutant import Mutant, missed_among  # noqa: E402

PRELOADED = (
    "hypothesis.strategies", "IPython.core.interactiveshell", "ipyparallel",
    "ipywidgets", "nbformat", "torch",
)  # fmt: skip
LIMIT_S = 300.0
TABLE = re.compile(
    r"(?<=<!-- mutants: measured -->\n).*(?=<!-- mutants: end -->)", re.S
)


def run(root: Path, tests: Sequence[str], _cards: int) -> tuple[int | None, str]:
    """Run tests of a copy in a forked process. See `tests.mutants.mutant.Run`."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as output:
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=_pytest, args=(root, tests, output.name))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return None, output.read()
        return process.exitcode, output.read()


def _pytest(root: Path, tests: Sequence[str], output: str) -> None:
    os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path != str(ROOT))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # those of the copy are wanted
    # The process has imported modules of pytest's plugins before pytest.
    warning = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-q", "-x", "-p", "no:cacheprovider", "-W", warning]
    sys.exit(pytest.main([*options, *tests]))


def table(kinds: Mapping[str, Sequence[Mutant]], missed: Sequence[Mutant]) -> str:
    """The table of CONTRIBUTING.md."""
    rows = ["", "| kind of fault | caught | missed |", "| --- | --- | --- |"]
    for kind, mutants in kinds.items():
        names = "; ".join(each.name for each in mutants if each in missed)
        caught = sum(each not in missed for each in mutants)
        rows.append(f"| {kind} | {caught} of {len(mutants)} | {names} |")
    count = sum(map(len, kinds.values()))
    rows.append(f"| all | {count - len(missed)} of {count} | |")
    return "\n".join([*rows, "", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="parts of names, kinds or files"
    )
    given = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    chosen = [
        mutant
        for kind, mutants in KINDS.items()
        for mutant in mutants
        for text in [f"{kind} {mutant.name} {mutant.file}"]
        if not given.only or any(part in text for part in given.only)
    ]
    missed = missed_among(chosen, [run])
    if not given.only:
        page = ROOT / "CONTRIBUTING.md"
        text = page.read_text(encoding="utf-8")
        page.write_text(TABLE.sub(lambda _: table(KINDS, missed), text), "utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
