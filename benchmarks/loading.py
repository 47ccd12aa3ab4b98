"""The first lines of a notebook, beside imports that many notebooks begin with."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks import report
from benchmarks.measure import alternate, printed_by, summary

REPEATS = 15
LIMIT_S = 120
BESIDE = "from IPython.core.interactiveshell import InteractiveShell"
LINES = {
    BESIDE: BESIDE,
    "%load_ext nbdist": 'shell.run_line_magic("load_ext", "nbdist")',
    "import ipyparallel": "import ipyparallel",
    "import torch": "import torch",
}
PROGRAM = """
import time
{before}
begun = time.perf_counter()
{line}
print(time.perf_counter() - begun)
"""
SHELL = f"{BESIDE}\nshell = InteractiveShell.instance()"


def seconds_of_line(name: str) -> float:
    """Run a line in a fresh interpreter, which has IPython's shell unless it loads it.

    Returns:
        The seconds that the line took.
    """
    before = "" if name == BESIDE else SHELL
    program = PROGRAM.format(before=before, line=LINES[name])
    return float(printed_by(program, LIMIT_S))


def main() -> None:
    times = alternate({name: partial(seconds_of_line, name) for name in LINES}, REPEATS)
    base = statistics.median(times[BESIDE])
    rows = [
        [f"`{name}`", summary(spent), f"{statistics.median(spent) / base:.2f}"]
        for name, spent in times.items()
    ]
    report.save(
        "loading",
        times,
        report.table(["line", "median (middle half)", "ratio"], rows)
        + f"\n\n{REPEATS} runs each in fresh interpreters. IPython's shell is loaded "
        "before each line except its own.",
    )


if __name__ == "__main__":
    main()
