"""All-reduce between two hosts whose link is limited.

    python -m benchmarks hosts

The hosts are network namespaces of this machine, as in tests/hosts, with two ranks
each; tc limits the link of each. Needs root, iproute2, openssh-server and nftables. The
hosts share this machine's cores.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import report
from tests.hosts.network import HostNetwork, why_not
from tests.hosts.traits import equal

RATES = ("1gbit", "100mbit")
SIZES = (2**12, 2**18, 2**22)
"""Bytes of float32."""
ROUNDS = 12
WAYS = {
    "flat: ring": 'nbdist.all_reduce(x, algorithm="ring")',
    "flat: nbdist's MPI messages": 'nbdist.all_reduce(x, algorithm="mpi")',
    "flat: MPI_Allreduce": "MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())",
    "flat: gloo": "dist.all_reduce(x, group=gloo)",
    "hierarchical (the default)": "nbdist.all_reduce(x)",
    "hierarchical, bf16": 'nbdist.all_reduce(x, compression="bf16")',
    "hierarchical, int8": 'nbdist.all_reduce(x, compression="int8")',
}
START = (
    """
import nbdist
cluster = nbdist.Cluster(hosts="a:2,b:2", device="cpu", oversubscribe=True).start()
cluster.execute('''
import time
import torch.distributed as dist
from mpi4py import MPI
gloo = dist.new_group(backend="gloo")

def timed(call):
    call()  # which connects the ranks
    best = float("inf")
    for _ in range(ROUNDS):
        x.fill_(1)
        MPI.COMM_WORLD.Barrier()
        begun = time.perf_counter()
        call()
        took = MPI.COMM_WORLD.allreduce(time.perf_counter() - begun, MPI.MAX)
        best = min(best, took)
    return best
'''.replace("ROUNDS", "%d"))

def measure(size, code):
    cell = f"x = torch.ones({{size // 4}}); print(timed(lambda: {{code}}))"
    return float(cluster.execute(cell)[0].stdout)
""".replace("%d", str(ROUNDS))
    .replace("{{", "{")
    .replace("}}", "}")
)


def main() -> int:
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    results: list[dict[str, Any]] = []
    with (
        HostNetwork(("a", "b"), equal(2)) as network,
        network["a"].console() as console,
    ):
        console.do(START)
        for rate in RATES:
            for host in network.hosts.values():
                host.slow(rate)
            for size in SIZES:
                for way, code in WAYS.items():
                    seconds = console.value(f"measure({size}, {code!r})")
                    row = {"rate": rate, "bytes": size, "way": way, "seconds": seconds}
                    results.append(row)
                    print(row, flush=True)
        for host in network.hosts.values():
            host.unslow()
        console.do("cluster.stop()")
    report.save("hosts", results, _tables(results))
    return 0


def _tables(results: list[dict[str, Any]]) -> str:
    columns = [(rate, size) for rate in RATES for size in SIZES]
    found = {(r["rate"], r["bytes"], r["way"]): r["seconds"] for r in results}
    header = ["ms", *(f"{size // 1024} KiB, {rate}/s" for rate, size in columns)]
    rows = [
        [way, *(f"{found[(*column, way)] * 1e3:.3g}" for column in columns)]
        for way in WAYS
    ]
    text = f"Of 4 ranks on 2 hosts, the best of {ROUNDS}, of the slowest rank."
    return f"{report.table(header, rows)}\n\n{text}"


if __name__ == "__main__":
    sys.exit(main())
