"""100 MB from the notebook to four ranks, and back from one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.measure import alternate, seconds_of, summary
from benchmarks.peer import ipyparallel_client
from nbdist import Cluster

RANKS = 4
REPEATS = 15
BYTES = 100_000_000
READ = "total = float(x.sum())"


def variants(cluster: Cluster, client: Any, value: Any) -> dict[str, dict[str, Any]]:
    """What to time, by work and variant. Each ends when every rank has the value."""
    view = client[:]

    def nbdist_push_and_read() -> None:
        cluster.push(x=value)
        cluster.execute(READ)

    def peer_push_and_read() -> None:
        view.push({"x": value}, block=True)
        view.execute(READ, block=True)

    return {
        f"push to {RANKS} ranks": {
            "nbdist": lambda: cluster.push(x=value),
            "ipyparallel": lambda: view.push({"x": value}, block=True),
        },
        f"push to {RANKS} ranks, and every rank reads it": {
            "nbdist": nbdist_push_and_read,
            "ipyparallel": peer_push_and_read,
        },
        "pull from one rank, and read it": {
            "nbdist": lambda: cluster.pull("x", [0])[0].sum(),
            "ipyparallel": lambda: view.pull("x", targets=0, block=True).sum(),
        },
    }


def check(cluster: Cluster, client: Any, value: Any) -> None:
    """Check that the value pushed last has arrived complete, by both variants."""
    expected = float(value.sum())
    assert cluster[READ.partition(" = ")[2]] == [expected] * RANKS
    assert client[:]["total"] == [expected] * RANKS


def main() -> None:
    values = {
        "numpy float64": np.arange(BYTES // 8, dtype=np.float64),
        "torch float32": torch.ones(BYTES // 4),
    }
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    rows = []
    with Cluster(RANKS, device="cpu") as cluster, ipyparallel_client(RANKS) as client:
        client[:].execute("import numpy, torch; torch.set_num_threads(1)", block=True)
        for kind, value in values.items():
            results[kind] = {}
            for work, pair in variants(cluster, client, value).items():
                timed = {name: seconds_of(action) for name, action in pair.items()}
                times = results[kind][work] = alternate(timed, REPEATS)
                ours, theirs = times["nbdist"], times["ipyparallel"]
                ratio = float(np.median(theirs) / np.median(ours))
                cells = [summary(ours), summary(theirs), f"{ratio:.1f}"]
                rows.append([kind, work, *cells])
            check(cluster, client, value)
    header = ["value", "work", "nbdist", "ipyparallel", "times faster"]
    report.save(
        "transfer",
        results,
        report.table(header, rows)
        + f"\n\nMedian of {REPEATS} runs (and the middle half of them), of "
        f"{BYTES / 1e6:.0f} MB. nbdist's ranks map one copy and get its pages as they "
        "touch them, so a push alone says less than a push and a read.",
    )


if __name__ == "__main__":
    main()
