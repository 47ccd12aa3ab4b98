"""When the notebook has its kernel back after `%%distributed -b`.

Timed from outside the kernel: from the request to the kernel's reply.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from jupyter_client.manager import start_new_kernel

from benchmarks import report
from benchmarks.cells import Kernel, running_kernel
from benchmarks.measure import Times, summary

RANKS = 4
REPEATS = 100
LIMIT_MS = 50
SETUP = f"""
%load_ext nbdist
%dist_start -n {RANKS} --device cpu
"""
WAIT_FOR_IMPORT = """
import sys, threading
[each.join(10) for each in threading.enumerate() if each.name == "nbdist-import"]
"""
"""A person takes longer to type the next cell. The first time is measured by itself."""
CELLS = {
    "that holds `pass`": "pass",
    "that prints 5,000 lines on each rank": "for i in range(5000): print(rank, i)",
    "that computes on all cores": "for i in range(5): torch.ones(700, 700) @ "
    "torch.ones(700, 700)",
}
LONG = "%%distributed -b\nimport time; time.sleep(60)"


def measure(kernel: Kernel) -> Times:
    """The times of each kind of cell in the background."""
    times: Times = {"the first one": [kernel.run("%%distributed -b\npass")]}
    kernel.run("%dist_wait")

    def behind(code: str) -> Callable[[], float]:
        def variant() -> float:
            seconds = kernel.run(f"%%distributed -b\n{code}")
            kernel.run("%dist_wait")
            return seconds

        return variant

    for name, code in CELLS.items():
        variant = behind(code)
        times[name] = [variant() for _ in range(REPEATS)]
    kernel.run(LONG)
    queued = [kernel.run("%%distributed -b\npass") for _ in range(REPEATS)]
    times["that waits behind another one"] = queued
    kernel.run("%dist_interrupt")
    return times


def main() -> None:
    times: Times = {}
    with running_kernel(*start_new_kernel(), SETUP, "%dist_stop") as kernel:
        kernel.run(WAIT_FOR_IMPORT)
        times = measure(kernel)
    rows = [
        [
            name,
            summary(each),
            f"{1e3 * statistics.quantiles(each, n=20)[-1]:.3g} ms" if each[1:] else "",
            f"{1e3 * max(each):.3g} ms",
            f"{sum(1e3 * seconds > LIMIT_MS for seconds in each)} of {len(each)}",
        ]
        for name, each in times.items()
    ]
    header = ["cell with `-b`", "median (middle half)", "95 % within", "slowest",
              f"above {LIMIT_MS} ms"]  # fmt: skip
    report.save(
        "background",
        times,
        report.table(header, rows)
        + f"\n\n{RANKS} ranks. From the request to the kernel until its reply, after "
        "which the next cell can run. The ranks begin with the cell meanwhile, so that "
        "they and the kernel share the cores.",
    )


if __name__ == "__main__":
    main()
