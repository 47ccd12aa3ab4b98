"""From the first statement to the first finished collective, on four ranks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

from benchmarks import report
from benchmarks.measure import alternate, summary
from benchmarks.peer import allow_open_mpi

RANKS = 4
REPEATS = 7
LIMIT_S = 120
IMPORTS = "import torch, ipyparallel.engine.app, mpi4py.MPI"

NBDIST = f"""
import time
begun = time.perf_counter()
import nbdist
cluster = nbdist.Cluster({RANKS}, device="cpu")
cluster.start()
up = time.perf_counter()
cluster.execute("x = torch.ones(1); nbdist.all_reduce(x); assert x == world_size")
done = time.perf_counter()
cluster.stop()
print([up - begun, done - begun])
"""

PEER = f"""
import tempfile, time
from benchmarks.peer import ipyparallel_client

def collective(folder):
    import os, torch, torch.distributed as dist
    from mpi4py.MPI import COMM_WORLD as world
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(folder + "/store", world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == world.size

begun = time.perf_counter()
with tempfile.TemporaryDirectory() as folder, ipyparallel_client({RANKS}) as client:
    up = time.perf_counter()
    client[:].apply_sync(collective, folder)
    done = time.perf_counter()
print([up - begun, done - begun])
"""


def main() -> None:
    phases: dict[str, list[float]] = {"nbdist": [], "ipyparallel": []}
    with allow_open_mpi():
        times = alternate(
            {
                "the bare imports": bare_imports,
                "nbdist": lambda: in_fresh_python(NBDIST, phases["nbdist"]),
                "ipyparallel": lambda: in_fresh_python(PEER, phases["ipyparallel"]),
            },
            REPEATS,
        )
    bare = statistics.median(times["the bare imports"])
    rows = [
        [
            name,
            summary(seconds, "s"),
            f"{min(seconds):.1f} s",
            f"{statistics.median(seconds) / bare:.2f}",
        ]
        for name, seconds in times.items()
    ]
    ups = ", ".join(f"{name} {summary(u[1:], 's')}" for name, u in phases.items())
    report.save(
        "start",
        {"times": times, "up": phases},
        report.table(
            ["start of 4 ranks", "median (middle half)", "fastest", "ratio"], rows
        )
        + f"\n\n{REPEATS} runs each in fresh interpreters, to the end of the first "
        f"all-reduce. Of these, to four ranks that answer: {ups}. The bare imports are "
        f"`mpiexec -n {RANKS} python -c '{IMPORTS}'`.",
    )


def bare_imports() -> float:
    command = ["-n", str(RANKS), sys.executable, "-c", IMPORTS]
    begun = time.perf_counter()
    subprocess.run(["mpiexec", *command], check=True, timeout=LIMIT_S)
    return time.perf_counter() - begun


def in_fresh_python(program: str, ups: list[float]) -> float:
    """Run a program that prints [seconds until up, seconds until done]."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    up, seconds = json.loads(done.stdout.splitlines()[-1])
    ups.append(up)
    return float(seconds)


if __name__ == "__main__":
    main()
