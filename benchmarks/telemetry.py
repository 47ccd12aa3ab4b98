"""A call of `nbdist.log` on a rank, and a point that the notebook receives.

Beside them, what a program would write itself: a list, and a queue of `logging`.
"""

from __future__ import annotations

import statistics

from benchmarks import report
from benchmarks.measure import Times, alternate
from nbdist import Cluster
from nbdist.telemetry.collector import Collector
from nbdist.wire import Batch, Sample

REPEATS = 50
CALLS = 200
POINTS = 1000


def on_rank() -> Times:
    """Seconds of one call, as a rank measures them."""
    import logging
    import time
    from collections.abc import Callable
    from logging.handlers import QueueHandler
    from queue import SimpleQueue

    import torch

    import nbdist
    from benchmarks.measure import alternate

    kept: list[object] = []
    queue: SimpleQueue[object] = SimpleQueue()
    logger = logging.Logger("benchmark")
    logger.addHandler(QueueHandler(queue))
    tensor = torch.tensor(0.5)

    def calls(call: Callable[[], object]) -> Callable[[], float]:
        def variant() -> float:
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            spent = time.perf_counter() - begun
            kept.clear()
            while not queue.empty():
                queue.get()
            return spent / CALLS

        return variant

    variants: dict[str, Callable[[], object]] = {
        "list.append": lambda: kept.append((time.time(), {"loss": 0.5, "lr": 0.1})),
        "nbdist.log": lambda: nbdist.log(loss=0.5, lr=0.1),
        "nbdist.log of a tensor": lambda: nbdist.log(loss=tensor, lr=0.1),
        "logging.QueueHandler": lambda: logger.info("loss %f lr %f", 0.5, 0.1),
    }
    return alternate({name: calls(c) for name, c in variants.items()}, REPEATS)


def in_notebook() -> Times:
    """Seconds of one point in the notebook's process."""
    import time

    collector = Collector()
    kept: list[tuple[int, float, float]] = []
    numbers = iter(range(10**9))

    def received() -> float:
        number = next(numbers)
        steps = range(number * POINTS, (number + 1) * POINTS)
        records = tuple(Sample(0, step, step, {"loss": 0.5}) for step in steps)
        batch = Batch(0, "benchmark", number, 0, records)
        begun = time.perf_counter()
        collector.receive(batch)
        return (time.perf_counter() - begun) / POINTS

    def appended() -> float:
        begun = time.perf_counter()
        for step in range(POINTS):
            point = step, float(step), 0.5
            kept.append(point)
        spent = (time.perf_counter() - begun) / POINTS
        kept.clear()
        return spent

    return alternate({"list.append": appended, "Collector": received}, REPEATS)


def rows(where: str, times: Times) -> list[list[str]]:
    """A row for each variant, beside `list.append`."""
    base = statistics.median(times["list.append"])
    found = []
    for name, spent in times.items():
        low, middle, high = statistics.quantiles(
            [seconds * 1e6 for seconds in spent], n=4, method="inclusive"
        )
        text = f"{middle:.2f} µs ({low:.2f} to {high:.2f})"
        found.append([where, f"`{name}`", text, f"{middle / 1e6 / base:.1f}"])
    return found


def main() -> None:
    with Cluster(1, device="cpu") as cluster:
        (called,) = cluster.run(on_rank)
    received = in_notebook()
    report.save(
        "telemetry",
        {"on a rank": called, "in the notebook": received},
        report.table(
            ["where", "call", "median (middle half)", "ratio"],
            rows("a rank", called) + rows("the notebook", received),
        )
        + f"\n\nMedian of {REPEATS} turns of {CALLS} calls with two scalars on a rank, "
        f"while its recorder publishes; and of {REPEATS} batches of {POINTS} points "
        "in the notebook. `QueueHandler` is that of Python's `logging`, which also "
        "leaves its records to another thread.",
    )


if __name__ == "__main__":
    main()
