"""From the first statement to the first finished collective.

Also what it takes with and without the fork server, for up to 32 ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import report
from benchmarks.measure import printed_by, summary
from benchmarks.peer import allow_open_mpi

RANKS = 4
REPEATS = 5
SIZES = (4, 8, 16, 32)
REPEATS_OF_SIZES = 3
WAYS = ("warm", "cold", "without")
LIMIT_S = 120
SIZES_LIMIT_S = 600
IMPORTS = "import torch, ipyparallel.engine.app, mpi4py.MPI"
PEER_PYTHON = "NBDIST_BENCH_JUPYTER_DISTRIBUTED"
"""The variable with the Python of an environment that has jupyter-distributed."""

BARE = f"""
import json, subprocess, sys
from benchmarks.footprint import Meter
meter = Meter()
command = ["-n", "{RANKS}", sys.executable, "-c", "{IMPORTS}"]
subprocess.run(["mpiexec", *command], check=True)
print(json.dumps({{**meter.read(), "PSS": None}}))
"""

NBDIST = f"""
import json, os, sys
from benchmarks.footprint import Meter
if sys.argv[1] == "warm":
    from nbdist.clusters import fork_server_client
    fork_server_client.prepare(os.environ)
    assert fork_server_client.await_ready(60)
meter = Meter()
import nbdist
cluster = nbdist.Cluster({RANKS}, device="cpu")
cluster.start()
up = meter.seconds
cluster.execute("x = torch.ones(1); nbdist.all_reduce(x); assert x == world_size")
found = meter.read(up=up)
cluster.stop()
print(json.dumps(found))
"""

IPYPARALLEL = f"""
import json, tempfile
from benchmarks.footprint import Meter
meter = Meter()
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

with tempfile.TemporaryDirectory() as folder, ipyparallel_client({RANKS}) as client:
    up = meter.seconds
    client[:].apply_sync(collective, folder)
    found = meter.read(up=up)
print(json.dumps(found))
"""

JUPYTER_DISTRIBUTED = f"""
import json, os, sys, tempfile
from benchmarks.footprint import Meter
meter = Meter()
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

COLLECTIVE = '''
import os, torch, torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(folder + "/store", size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
x = torch.ones(1)
dist.all_reduce(x)
assert x == {RANKS}
'''
command = [sys.executable, "-m", "jupyter_distributed.kernel", "-f"]
manager = KernelManager()
manager._kernel_spec = KernelSpec(argv=[*command, "{{connection_file}}"])
environment = {{**os.environ, "JUPYTER_DISTRIBUTED_WORLD_SIZE": "{RANKS}"}}
manager.start_kernel(env=environment)
client = manager.client()
client.start_channels()
client.wait_for_ready({LIMIT_S})
up = meter.seconds
with tempfile.TemporaryDirectory() as folder:
    code = f"folder = {{folder!r}}" + COLLECTIVE
    answer = client.execute(code, reply=True, timeout={LIMIT_S})
    found = meter.read(up=up)
assert answer["content"]["status"] == "ok", answer
client.stop_channels()
manager.shutdown_kernel()
print(json.dumps(found))
"""

SIZED = """
import json, os, signal, sys, time
import nbdist
from benchmarks.footprint import Meter
from nbdist.clusters import fork_server_client

ranks, way = int(sys.argv[1]), sys.argv[2]
SUM = "x = torch.ones(1); nbdist.all_reduce(x); assert x == world_size"

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
found = {}
for work in (start, replace, restart):
    meter = Meter()
    work()
    found[work.__name__] = meter.read()
    assert all((i.started == "forked") == (way != "without") for i in cluster.infos)
cluster.stop()
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.start", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--repeats", type=int, default=REPEATS_OF_SIZES)
    parser.add_argument("--sizes-alone", action="store_true")
    parser.add_argument("--others-alone", action="store_true")
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    texts = []
    if not chosen.sizes_alone:
        for name, cores in (("quiet", 0), ("busy", 1)):
            with busy(cores):
                results[name] = beside_others()
            texts.append(others_table(results[name], cores))
        texts.append(
            f"{REPEATS} runs each in fresh interpreters that take turns, to the end of "
            "the first all-reduce. CPU time and memory are those of all processes. "
            "They include the fork server's imports where it is cold. The bare imports "
            f"are `mpiexec -n {RANKS} python -c '{IMPORTS}'`."
        )
    if not chosen.others_alone:
        results["sizes"] = [sized_run(n, chosen.repeats) for n in chosen.sizes]
        texts.append(sizes_text(results["sizes"], chosen.repeats))
    report.save("start", results, "\n\n".join(texts))


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep some cores busy with other processes in a `with` block."""
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(cores)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


# -- beside others -----------------------------------------------------------------


def contestants() -> dict[str, tuple[str, list[str], str]]:
    """By name: a program, its arguments, and its Python."""
    here = sys.executable
    found = {
        "the bare imports": (BARE, [], here),
        "nbdist, fork server warm": (NBDIST, ["warm"], here),
        "nbdist, cold": (NBDIST, ["cold"], here),
        "ipyparallel": (IPYPARALLEL, [], here),
    }
    python = os.environ.get(PEER_PYTHON)
    if python is None and importlib.util.find_spec("jupyter_distributed"):
        python = here
    if python is not None:
        found["jupyter-distributed"] = (JUPYTER_DISTRIBUTED, [], python)
    return found


def beside_others() -> dict[str, list[dict[str, Any]]]:
    """The runs of each contestant, in turns. The first turn is not counted."""
    chosen = contestants()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with allow_open_mpi():
        for turn in range(1 + REPEATS):
            for name, (program, arguments, python) in chosen.items():
                printed = printed_by(program, LIMIT_S, *arguments, python=python)
                print(name, printed, flush=True)
                if turn > 0:
                    runs[name].append(json.loads(printed))
    return runs


def others_table(runs: dict[str, list[dict[str, Any]]], busy_cores: int) -> str:
    bare = middle(runs["the bare imports"], "seconds")
    rows = []
    for name, own in runs.items():
        seconds = [run["seconds"] for run in own]
        row = [name, summary(seconds, "s"), f"{statistics.median(seconds) / bare:.2f}"]
        row.append(f"{middle(own, 'up'):.2f} s" if "up" in own[0] else "")
        row.append(f"{middle(own, 'CPU'):.1f} s")
        row.append(f"{middle(own, 'PSS') / 1e6:.0f} MB" if own[0]["PSS"] else "")
        rows.append(row)
    load = f", {busy_cores} core busy" if busy_cores else ""
    header = [f"start of {RANKS} ranks{load}", "median (middle half)", "ratio",
              "ranks answer", "CPU time", "memory (PSS)"]  # fmt: skip
    return report.table(header, rows)


# -- sizes -------------------------------------------------------------------------


def sized_run(n: int, repeats: int) -> dict[str, Any]:
    """What some ranks cost, each way in turn."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, runs in found.items():
            runs.append(measured(n, way))
    return {"ranks": n, "ways": found}


def measured(n: int, way: str) -> dict[str, Any]:
    """One run in a fresh interpreter."""
    switch = {"NBDIST_PRELOAD": "0" if way == "without" else ""}
    printed = printed_by(SIZED, SIZES_LIMIT_S, str(n), way, env=switch)
    print(n, way, printed, flush=True)
    found: dict[str, Any] = json.loads(printed)
    return found


def sizes_text(sizes: list[dict[str, Any]], repeats: int) -> str:
    header = ["ranks, fork server", "start", "CPU time", "memory (PSS)", "replace",
              "restart"]  # fmt: skip
    rows = [row for of_size in sizes for row in size_rows(of_size)]
    text = report.table(header, rows) + (
        f"\n\nMedian of {repeats} runs each, and in brackets the ratio to the run "
        "without the fork server. Start: from `Cluster.start` to the end of the first "
        "all-reduce. CPU time and memory are those of all processes, the notebook's "
        "and the fork server's among them. Replace: from `kill -9` of a rank to the "
        "end of the next all-reduce. Restart: `%dist_restart` and an all-reduce."
    )
    first, last = sizes[0], sizes[-1]
    added = last["ranks"] - first["ranks"]
    if added > 0:
        seconds = warm_start(last) - warm_start(first)
        text += f" A further rank adds {seconds / added:.3f} s to a warm start."
    return text


def warm_start(of_size: dict[str, Any]) -> float:
    return middle([run["start"] for run in of_size["ways"]["warm"]], "seconds")


def size_rows(of_size: dict[str, Any]) -> list[list[str]]:
    """A row for each way; each value with the ratio to that without the fork server."""
    rows = []
    for way in WAYS:
        cells = [f"{of_size['ranks']}, {way}"]
        for work, name in (
            ("start", "seconds"), ("start", "CPU"), ("start", "PSS"),
            ("replace", "seconds"), ("restart", "seconds"),
        ):  # fmt: skip
            here, without = (
                middle([run[work] for run in of_size["ways"][each]], name)
                for each in (way, "without")
            )
            text = f"{here / 1e6:.0f} MB" if name == "PSS" else f"{here:.2f} s"
            cells.append(f"{text} ({here / without:.2f})")
        rows.append(cells)
    return rows


def middle(runs: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


if __name__ == "__main__":
    main()
