"""From `quit` in a rank's debugger until the cell has ended on all ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import nbdist
from benchmarks import report
from benchmarks.measure import Times, alternate, summary
from nbdist.widgets.user_input import UserInput

RANKS = 4
REPEATS = 50
LIMIT_S = 1.0

SETUP = """
from torch.nn.parallel import DistributedDataParallel

def backward(stops):
    layers = [torch.nn.Linear(500, 500) for _ in range(4)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers))
    if stops:
        layers[0].weight.register_hook(lambda gradient: breakpoint())
    ddp(torch.ones(8, 500)).sum().backward()
"""
CELLS = {
    "wait in a barrier": "if rank == STOPS: breakpoint()\nnbdist.barrier()",
    "wait in DDP's backward": "backward(rank == STOPS)",
    "compute": "if rank == STOPS: breakpoint()\n"
    "while True: torch.ones(300, 300) @ torch.ones(300, 300)",
    "have stopped too": "breakpoint()",
}


class _Quits(UserInput):
    """Answers each prompt with `quit`."""

    refusal = ""
    at = 0.0
    """When it has answered last, on the monotonic clock."""

    def show(self, text: str) -> None:
        pass

    def read(self, prompt: str, *, hidden: bool = False) -> str:
        self.at = time.monotonic()
        return "quit"


def measure(cluster: nbdist.Cluster) -> Times:
    """The times of each kind of cell."""
    user = cluster._live_supervisor().reader = _Quits()

    def quitting(code: str) -> Callable[[], float]:
        stops = itertools.cycle(range(RANKS))

        def variant() -> float:
            try:
                cluster.execute(code.replace("STOPS", str(next(stops))))
            except nbdist.CellInterrupted:
                return time.monotonic() - user.at
            raise RuntimeError("the cell was not interrupted")

        return variant

    return alternate({n: quitting(code) for n, code in CELLS.items()}, REPEATS)


def main() -> None:
    with nbdist.Cluster(RANKS, device="cpu") as cluster:
        cluster.execute(SETUP)
        times = measure(cluster)
    rows = [
        [
            name,
            summary(each),
            f"{1e3 * max(each):.3g} ms",
            f"{sum(seconds > LIMIT_S for seconds in each)} of {len(each)}",
        ]
        for name, each in times.items()
    ]
    header = ["the other ranks", "median (middle half)", "slowest", "above 1 s"]
    report.save(
        "debugger",
        times,
        report.table(header, rows)
        + f"\n\n{RANKS} ranks, of which each stops in turn. From the answer at the "
        "prompt to the error of the cell in the notebook. All ranks can run the next "
        "cell then.",
    )


if __name__ == "__main__":
    main()
