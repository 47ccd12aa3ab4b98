"""A training step with `nbdist.watch`, beside the same step without it."""

from __future__ import annotations

import statistics

from benchmarks import report
from benchmarks.measure import Times, summary
from nbdist import Cluster

REPEATS = 100
MODELS = {
    "perceptron, 1 million parameters, 32 samples": ("perceptron", 32),
    "perceptron, 1 million parameters, 1,024 samples": ("perceptron", 1024),
    "transformer, 0.8 million parameters, 16 × 64 tokens": ("transformer", 16),
}
BARE, CHECKED, IDLE = "step", "with a check", "between checks"


def on_rank(kind: str, batch: int) -> Times:
    """Seconds of a step: not watched, checked, and between two checks."""
    from collections.abc import Callable

    import torch
    from torch import nn

    import nbdist
    from benchmarks.measure import alternate, seconds_of

    def made() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        if kind == "perceptron":
            layers = [nn.Sequential(nn.Linear(500, 500), nn.ReLU()) for _ in range(4)]
            return nn.Sequential(*layers), torch.randn(batch, 500)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        return nn.TransformerEncoder(layer, 4), torch.randn(batch, 64, 128)

    def step_of(every: int | None) -> Callable[[], float]:
        model, inputs = made()
        optimizer = torch.optim.Adam(model.parameters())
        if every is not None:
            nbdist.watch(model, every=every)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        return seconds_of(step)

    variants = {BARE: step_of(None), CHECKED: step_of(1), IDLE: step_of(10**9)}
    return alternate(variants, REPEATS, warmups=3)


def row(model: str, times: Times) -> list[str]:
    step, checked, idle = (
        statistics.median(times[name]) for name in (BARE, CHECKED, IDLE)
    )
    cost = (checked + 99 * idle) / 100 / step - 1
    return [
        model, summary(times[BARE]), summary(times[CHECKED]), f"{checked / step:.2f}",
        f"{idle / step:.3f}", f"{cost:.1%}",
    ]  # fmt: skip


def main() -> None:
    with Cluster(1, device="cpu") as cluster:
        times = {
            model: cluster.run(on_rank, kind, batch)[0]
            for model, (kind, batch) in MODELS.items()
        }
    header = [
        "model", "step", "step with a check", "ratio", "step between checks, ratio",
        "cost with every=100",
    ]  # fmt: skip
    report.save(
        "watch",
        times,
        report.table(header, [row(each, found) for each, found in times.items()])
        + f"\n\nMedian of {REPEATS} runs (and the middle half of them) on a CPU rank. "
        "A step is forward, backward and Adam's step.",
    )


if __name__ == "__main__":
    main()
