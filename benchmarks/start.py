"""From the first statement to the first finished collective.

Also what it takes with and without the fork server, for up to 32 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import report
from benchmarks.measure import alternate, printed_by, summary
from benchmarks.peer import allow_open_mpi

RANKS = 4
REPEATS = 7
SIZES = (4, 8, 16, 32)
REPEATS_OF_SIZES = 3
WAYS = ("warm", "cold", "without")
LIMIT_S = 120
SIZES_LIMIT_S = 600
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

SIZED = """
import json, os, signal, sys, time
import psutil
import nbdist
from nbdist.cluster import fork_server_client

ranks, way = int(sys.argv[1]), sys.argv[2]
SUM = "x = torch.ones(1); nbdist.all_reduce(x); assert x == world_size"

def tree():
    this = psutil.Process()
    return [this, *this.children(recursive=True)]

def cpu_seconds():
    return sum(sum(process.cpu_times()[:4]) for process in tree())

def timed(work):
    begun, before = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - begun, cpu_seconds() - before

def start():
    cluster.start()
    cluster.execute(SUM)

def replace():
    os.kill(cluster.infos[1].pid, signal.SIGKILL)
    while not cluster.died():
        time.sleep(0.001)
    cluster.execute(SUM)

def restart():
    cluster.restart()
    cluster.execute(SUM)

if way == "warm":
    fork_server_client.prepare(os.environ)
    assert fork_server_client.await_ready(60)
cluster = nbdist.Cluster(ranks, device="cpu", oversubscribe=True, timeout_s=500)
found = {"start": timed(start)}
assert all((i.started == "forked") == (way != "without") for i in cluster.infos)
found["PSS"] = sum(process.memory_full_info().pss for process in tree())
found["replace"], found["restart"] = timed(replace), timed(restart)
cluster.stop()
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--repeats", type=int, default=REPEATS_OF_SIZES)
    parser.add_argument("--sizes-alone", action="store_true")
    chosen = parser.parse_args()
    results, text = {}, ""
    if not chosen.sizes_alone:
        results, text = beside_others()
    sized = [sized_run(n, chosen.repeats) for n in chosen.sizes]
    header = ["ranks, fork server", "start", "CPU time", "memory (PSS)", "replace",
              "restart"]  # fmt: skip
    rows = [row for of_size in sized for row in size_rows(of_size)]
    text += "\n\n" + report.table(header, rows)
    text += (
        f"\n\nMedian of {chosen.repeats} runs each. Start: from `Cluster.start` to the "
        "end of the first all-reduce. CPU time and memory are those of all processes, "
        "the notebook's and the fork server's among them. Replace: from `kill -9` of a "
        "rank to the end of the next all-reduce. Restart: `%dist_restart` and an "
        "all-reduce."
    )
    report.save("start", {**results, "sizes": sized}, text)


def sized_run(n: int, repeats: int) -> dict[str, Any]:
    """What some ranks cost, each way in turn."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, runs in found.items():
            runs.append(measured(n, way))
    return {"ranks": n, "ways": found}


def measured(n: int, way: str) -> dict[str, Any]:
    """One run in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", SIZED, str(n), way],
        check=True,
        timeout=SIZES_LIMIT_S,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment(way)},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(n, way, found, flush=True)
    return found


def environment(way: str) -> dict[str, str]:
    return {"NBDIST_PRELOAD": "0" if way == "without" else ""}


def size_rows(of_size: dict[str, Any]) -> list[list[str]]:
    """A row for each way; times beside the ratio to those without the fork server."""
    rows = []
    for way in WAYS:
        cells = [f"{of_size['ranks']}, {way}"]
        for name, place in (
            ("start", 0), ("start", 1), ("PSS", None), ("replace", 0), ("restart", 0)
        ):  # fmt: skip
            here = middle(of_size["ways"][way], name, place)
            without = middle(of_size["ways"]["without"], name, place)
            unit = f"{here / 2**20:.0f} MiB" if place is None else f"{here:.2f} s"
            cells.append(f"{unit} ({here / without:.2f})")
        rows.append(cells)
    return rows


def middle(runs: list[dict[str, Any]], name: str, place: int | None) -> float:
    values = [run[name] if place is None else run[name][place] for run in runs]
    return float(statistics.median(values))


def beside_others() -> tuple[dict[str, Any], str]:
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
    return (
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
    up, seconds = json.loads(printed_by(program, LIMIT_S))
    ups.append(up)
    return float(seconds)


if __name__ == "__main__":
    main()
