"""What each operation costs as the number of ranks grows, on this machine.

    python -m benchmarks world_size [--sizes 8 32 128]

The ranks are real ones, with torch and MPI. There are far more of them than cores, so
that a time holds what all ranks compute in it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.measure import printed_by

SIZES = (4, 8, 16, 32)
LIMIT_S = 460
COLUMNS = (
    "start", "cell", "call", "printed line", "status", "push 1 MB", "interrupt",
    "all-reduce 4 B", "all-reduce 1 MB", "barrier", "stop",
)  # fmt: skip
BEGIN = """
import json, os, statistics, sys, threading, time
import psutil
import nbdist
from nbdist.clusters import fork_server_client

ranks = int(sys.argv[1])
REPEATS = 20 if ranks <= 32 else 8
found = {}

def once(name, work):
    begun = time.perf_counter()
    work()
    found[name] = time.perf_counter() - begun
    print(ranks, name, found[name], file=sys.stderr, flush=True)

def median(name, work, repeats=REPEATS):
    work()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    found[name] = statistics.median(times)
    print(ranks, name, found[name], file=sys.stderr, flush=True)

def nothing():
    return None

def interrupted():
    def later():
        while not all(s and s["what"] for s in cluster.status().values()):
            time.sleep(0.01)
        began.append(time.perf_counter())
        cluster.interrupt()
    thread = threading.Thread(target=later)
    thread.start()
    try:
        cluster.execute("import time; time.sleep(300)")
    except nbdist.errors.NbdistError:
        ended.append(time.perf_counter())
    thread.join()

fork_server_client.prepare(os.environ)
assert fork_server_client.await_ready(60)
cluster = nbdist.Cluster(ranks, device="cpu", threads=1, oversubscribe=True,
                         timeout_s=400)
once("start", cluster.start)
median("call", lambda: cluster.run(nothing))
median("cell", lambda: cluster.execute("pass"))
median("printed line", lambda: cluster.execute("print(rank)"))
median("status", cluster.status)
data = os.urandom(10**6)
median("push 1 MB", lambda: cluster.push(data=data), 3)
"""
"""A program: the cluster, and what the notebook does with it."""
COLLECTIVES = """
SETUP = '''
import time
def timed(n, rounds):
    x = torch.ones(n)
    nbdist.all_reduce(x)
    nbdist.barrier()
    begun = time.perf_counter()
    for _ in range(rounds):
        nbdist.all_reduce(x)
    return (time.perf_counter() - begun) / rounds
def crossed(rounds):
    nbdist.barrier()
    begun = time.perf_counter()
    for _ in range(rounds):
        nbdist.barrier()
    return (time.perf_counter() - begun) / rounds
'''
cluster.execute(SETUP)
def of_ranks(name, code):
    cluster.execute("seconds = " + code)
    found[name] = max(cluster["seconds"])
    print(ranks, name, found[name], file=sys.stderr, flush=True)
of_ranks("all-reduce 4 B", "timed(1, 20)")
of_ranks("all-reduce 1 MB", "timed(250_000, 5)")
of_ranks("barrier", "crossed(20)")
"""
END = """
began, ended = [], []
interrupted()
found["interrupt"] = ended[0] - began[0]
own = psutil.Process()
below = [own, *own.children(recursive=True)]
found["PSS"] = sum(p.memory_full_info().pss for p in below if p.is_running())
found["processes"] = len(below)
once("stop", cluster.stop)
print(json.dumps(found))
"""
NOTE = (
    "Interrupt: from `cluster.interrupt` to the error of the cell. Memory is the PSS "
    "of the notebook's process and of all below it. The exponent is that between the "
    "fewest and the most ranks."
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.world_size", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    results = {}
    for n in parser.parse_args().sizes:
        results[n] = measured(BEGIN + COLLECTIVES + END, n)
        print(n, results[n], flush=True)
    report.save("world_size", results, text_of(results))


def measured(program: str, n: int, **variables: str) -> dict[str, float]:
    """The seconds of each operation with `n` ranks, and "PSS" in bytes.

    Args:
        program: `BEGIN`, other parts, and `END`.
        variables: Environment variables to add.
    """
    found: dict[str, float] = json.loads(
        printed_by(program, LIMIT_S, str(n), env=variables)
    )
    return found


def text_of(results: dict[int, dict[str, Any]]) -> str:
    """A row for each operation, and how its time grows from the fewest to the most."""
    return table_of(results, COLUMNS) + (
        "\n\nStart and stop once; else the median of 8 to 20. The times of collectives "
        f"are those of the slowest rank. {NOTE}"
    )


def table_of(results: dict[int, dict[str, Any]], columns: Sequence[str]) -> str:
    """The operations' times, and the memory."""
    sizes = sorted(results)
    header = ["seconds", *(f"{n} ranks" for n in sizes), "grows as"]
    rows = []
    for name in columns:
        found = [results[n][name] for n in sizes]
        row = [name, *(f"{each:.3g}" for each in found)]
        rows.append([*row, f"n^{exponent(sizes, found):.1f}"])
    memory = [results[n]["PSS"] / 1e6 for n in sizes]
    rows.append(["memory (MB)", *(f"{each:.0f}" for each in memory), ""])
    return report.table(header, rows)


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """The power of n by which times grow between the first size and the last."""
    if len(sizes) < 2:
        return 0.0
    return math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0])


if __name__ == "__main__":
    main()
