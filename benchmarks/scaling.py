"""What the costs of this machine predict for up to 512 ranks: table and picture.

Modelled but for the points of the worlds that were measured, and for what Horovod's
authors published.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cost import (
    Costs,
    efficiency,
    fit_messages,
    ring_seconds,
    server_seconds,
)

__all__ = ["ALONE", "PEER", "STEPS", "plot", "section"]

World = dict[str, Any]

ALONE, PEER = "no communication", "DDP over gloo"
STEPS = 4
"""In a turn: several, for LocalSGD averages once in it."""
TABLE_RANKS = (2, 8, 32, 128, 512)
CURVE_RANKS = tuple(2**power for power in range(1, 10))
SERVERS = 8
BACKWARD = 2 / 3
"""Of a step's arithmetic: for each product of the forward there are two."""
PUBLISHED = {
    "Horovod, Inception V3 and ResNet-101": (512, 0.90),
    "Horovod, VGG-16": (512, 0.68),
}
SHOWN = {
    "DDP over nbdist": "o", PEER: "s", "hvd.DistributedOptimizer": "^",
    "CentralStorage": "v",
}  # fmt: skip


def costs_of(worlds: dict[int, World]) -> Costs:
    """Alpha, beta and gamma, from the world of two ranks."""
    found = worlds[2]["costs"]
    alpha, beta = fit_messages(found["sizes"], found["seconds"])
    return Costs(alpha, beta, found["gamma"])


def step_seconds(world: World, model: str, way: str) -> float:
    """The median of a step of one way."""
    turns = world["models"][model]["ways"][way]["seconds"]
    return statistics.median(turns) / STEPS


def predict(costs: Costs, compute: float, nbytes: int, ranks: int) -> dict[str, float]:
    """The efficiency on so many ranks that train, by scheme.

    Args:
        compute: seconds of a step on one rank alone.
        nbytes: of the gradients, and of the parameters.
    """
    around = ring_seconds(costs, ranks, nbytes)
    return {
        "ring, after backward": efficiency(compute, around),
        "ring, beside backward": efficiency(compute, around, BACKWARD * compute),
        "1 server": efficiency(compute, server_seconds(costs, ranks, nbytes)),
        f"{SERVERS} servers": efficiency(
            compute, server_seconds(costs, ranks, nbytes, SERVERS)
        ),
    }


def predictions(worlds: dict[int, World], model: str, ranks: int) -> dict[str, float]:
    compute = step_seconds(worlds[1], model, ALONE)
    nbytes = worlds[1]["models"][model]["bytes"]
    return predict(costs_of(worlds), compute, nbytes, ranks)


def section(worlds: dict[int, World]) -> str:
    """What is predicted, from what, and how well that agrees with what was measured."""
    costs, models = costs_of(worlds), worlds[1]["models"]
    schemes = list(predictions(worlds, next(iter(models)), 2))
    rows = [
        [model, scheme, *(f"{each[scheme]:.0%}" for each in by_ranks)]
        for model in models
        for by_ranks in [[predictions(worlds, model, n) for n in TABLE_RANKS]]
        for scheme in schemes
    ]
    header = ["modelled efficiency", "scheme", *(f"{n} ranks" for n in TABLE_RANKS)]
    return "\n\n".join(
        [
            report.table(header, rows),
            "Modelled, with three costs that were measured between two ranks here: "
            f"alpha = {costs.alpha * 1e6:.2g} µs for a message, "
            f"beta = {costs.beta * 1e9:.2g} ns for a byte that is sent "
            f"({1 / costs.beta / 1e9:.2g} GB/s each way), "
            f"gamma = {costs.gamma * 1e9:.2g} ns for a byte that is added. These are "
            "MPI messages through shared memory. So the prediction is for ranks with a "
            "core each, for links as fast as this memory, with nothing that contends "
            "for them, and without what a call costs before it sends: an upper bound, "
            "and no measurement of a cluster. " + agreement(worlds, costs),
        ]
    )


def agreement(worlds: dict[int, World], costs: Costs) -> str:
    """The model beside nbdist's ring, in the worlds that there were."""
    compared = [
        f"{found['models'][model]['bytes'] / 1e6:.2g} MB on {ranks} ranks "
        f"{predicted * 1e3:.2g} ms, measured {found['models'][model]['ring'] * 1e3:.2g}"
        for ranks, found in worlds.items()
        if ranks > 1
        for model in found["models"]
        for predicted in [ring_seconds(costs, ranks, found["models"][model]["bytes"])]
    ]
    return (
        "It says of nbdist's ring all-reduce: "
        f"{'; '.join(compared)}; where ranks share cores it takes longer."
    )


# -- the picture -----------------------------------------------------------------------


def plot(worlds: dict[int, World], path: Path) -> None:
    """A panel for each model: lines are modelled, filled points are measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    models = list(worlds[1]["models"])
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(5.5 * len(models), 5.2), sharey=True, squeeze=False
    )
    for panel, model in zip(panels[0], models, strict=True):
        _draw_model(panel, worlds, model)
        _draw_measured(panel, worlds, model)
        _draw_published(panel)
        panel.set_xscale("log", base=2)
        panel.set(title=model, xlabel="ranks that train", ylim=(0, 1.2))
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("scaling efficiency")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize="small")
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_model(panel: Any, worlds: dict[int, World], model: str) -> None:
    curves = [predictions(worlds, model, ranks) for ranks in CURVE_RANKS]
    after, beside, one, several = (
        [curve[scheme] for curve in curves] for scheme in curves[0]
    )
    panel.fill_between(CURVE_RANKS, after, beside, color="#0072B2", alpha=0.15)
    lines = {
        "modelled: ring, after backward": (after, "#0072B2", "-"),
        "modelled: ring, beside backward": (beside, "#0072B2", "--"),
        "modelled: 1 parameter server": (one, "#D55E00", "-"),
        f"modelled: {SERVERS} parameter servers": (several, "#E69F00", "-"),
    }
    for label, (values, colour, style) in lines.items():
        panel.plot(CURVE_RANKS, values, style, c=colour, label=label)


def _draw_measured(panel: Any, worlds: dict[int, World], model: str) -> None:
    several = {ranks: found for ranks, found in worlds.items() if ranks > 1}
    for way, marker in SHOWN.items():
        points = {
            ranks: step_seconds(found, model, ALONE) / step_seconds(found, model, way)
            for ranks, found in several.items()
            if way in found["models"][model]["ways"]
        }
        if points:
            panel.plot(
                list(points), list(points.values()), marker, c="#333333",
                alpha=0.7, label=f"measured: {way}",
            )  # fmt: skip


def _draw_published(panel: Any) -> None:
    for (label, place), marker in zip(PUBLISHED.items(), "*P", strict=True):
        panel.plot(
            *place, marker, c="#009E73", ms=12, ls="", label=f"published: {label}"
        )
