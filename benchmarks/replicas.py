"""A check of the replicas, beside a training step, and a look at a large tensor."""

from __future__ import annotations

import statistics

from benchmarks import report
from benchmarks.measure import Times, summary
from nbdist import Cluster

RANKS = 2
REPEATS = 15
LAYERS = {"10,000": (100, 1), "1 million": (500, 4), "25 million": (2500, 4)}
BATCH = 32


def on_rank(width: int, layers: int) -> Times:
    """Seconds of a step, of a check and of a call without a check."""
    import time
    from collections.abc import Callable

    import torch
    from torch import nn

    import nbdist
    from benchmarks.measure import alternate, seconds_of

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def skipped() -> float:
        begun = time.perf_counter()
        for _ in range(1000):
            nbdist.check_replicas(model, optimizer, every=10**9)
        return (time.perf_counter() - begun) / 1000

    def together(work: Callable[[], None]) -> Callable[[], float]:
        timed = seconds_of(work)

        def variant() -> float:
            nbdist.barrier()
            return timed()

        return variant

    variants = {
        "step": together(step),
        "check": together(lambda: nbdist.check_replicas(model, optimizer)),
        "call without a check": skipped,
    }
    return alternate(variants, REPEATS, warmups=2)


def row(parameters: str, times: Times) -> list[str]:
    step, check, skipped = (statistics.median(times[name]) for name in times)
    ratio = check / step
    cost = (ratio + 99 * skipped / step) / 100
    return [
        parameters, summary(times["step"]), summary(times["check"]), f"{ratio:.2f}",
        f"{skipped * 1e6:.1f} µs", f"{cost:.2%}",
    ]  # fmt: skip


def main() -> None:
    with Cluster(RANKS, device="cpu") as cluster:
        times = {
            parameters: cluster.run(on_rank, width, layers)[0]
            for parameters, (width, layers) in LAYERS.items()
        }
    header = [
        "parameters", "training step", "check", "ratio", "call without a check",
        "cost with every=100",
    ]  # fmt: skip
    report.save(
        "replicas",
        times,
        report.table(header, [row(each, found) for each, found in times.items()])
        + f"\n\nMedian of {REPEATS} runs (and the middle half of them) on {RANKS} CPU "
        "ranks. A step is forward, backward and Adam's step of a perceptron with "
        f"{BATCH} samples on each rank, without communication. A check reads the "
        "model and Adam's two moments, three times the parameters in all. The cost is "
        "the part of the steps' time that 1 check and 99 calls without one add to 100 "
        "steps.",
    )


if __name__ == "__main__":
    main()
