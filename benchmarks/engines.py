"""What hundreds of ranks cost the notebook, on this machine.

    python -m benchmarks engines [--sizes 16 64 256]

Each rank is a process of its own, and a world of its own for MPI (`lone_ranks`). The
notebook starts them, sends them cells and calls, and ends them, as those of one world.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import report, world_size

SIZES = (4, 16, 64, 256)
COLUMNS = (
    "start", "cell", "call", "printed line", "status", "push 1 MB", "interrupt", "stop",
)  # fmt: skip
PICTURE = Path("docs/images/engines.png")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.engines", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    results = {}
    for n in parser.parse_args().sizes:
        results[n] = world_size.measured(
            world_size.BEGIN + world_size.END,
            n,
            NBDIST_PRELOAD="benchmarks.lone_ranks",
            PYTHONPATH=str(report.ROOT),
        )
        print(n, results[n], flush=True)
    _draw(results)
    picture = "![Seconds of each operation, by the number of ranks]"
    picture += f"({PICTURE.relative_to('docs')})"
    table = world_size.table_of(results, COLUMNS)
    text = f"{table}\n\n{picture}\n\n{world_size.NOTE}"
    report.save("engines", results, text)


def _draw(results: dict[int, dict[str, Any]]) -> None:
    """Plot each operation's time against the number of ranks."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    sizes = sorted(results)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name in COLUMNS:
        axes.plot(sizes, [results[n][name] for n in sizes], marker=".", label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    figure.savefig(report.ROOT / PICTURE, dpi=100)


if __name__ == "__main__":
    main()
