"""Work on two hosts: a start, a step of DDP, and a cell after an edit.

    python -m benchmarks host_work

The hosts are network namespaces of this machine, as in tests/hosts, with two ranks
each. They share this machine's cores. Needs root, iproute2, openssh-server and
nftables.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.hosts.network import HOME, HostNetwork, TestHost, why_not
from tests.hosts.traits import equal

REPEATS = 3
STEPS = 8
EDITS = 10
FILES = 1000
RATES = ("1gbit", "100mbit")
PROJECT = f"{HOME}/project"
FIRST_SUM = "/tmp/first_sum.py"
BY_MPI = "import torch; from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 4"
BY_TORCHRUN = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 4
dist.destroy_process_group()
"""
START = """
import nbdist
cluster = nbdist.Cluster(hosts="a:2,b:2", device="cpu", oversubscribe=True).start()
cluster.execute("x = torch.ones(1); nbdist.all_reduce(x); assert x == 4")
"""
DDP = """
cluster.execute('''
import time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
gloo = dist.new_group(backend="gloo")

def steps(count, group):
    model = DistributedDataParallel(torch.nn.Linear(1024, 1024), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times = []
    for _ in range(count):
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(torch.ones(8, 1024)).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    return min(times[2:])  # DDP makes its buckets in the first steps
''')
"""
SYNC = f"""
import os, statistics, time
import nbdist
os.chdir({PROJECT!r})
cluster = nbdist.Cluster(hosts="a:2,b:2", sync=".", device="cpu", oversubscribe=True)
cluster.start()
cluster.execute("import importlib, helper")

def edited(value):
    with open("helper.py", "w") as file:
        file.write(f"value = {{value}} # {{'x' * value}}")
    begun = time.perf_counter()
    found = cluster.execute("importlib.reload(helper); print(helper.value)")
    took = time.perf_counter() - begun
    assert [each.stdout.strip() for each in found] == [str(value)] * 4
    return took
"""


def starts(host: TestHost) -> dict[str, float]:
    """Seconds from the command to the end of the first sum over all ranks."""
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    root = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
    by_mpi = [
        *("env", *root, mpiexec, "--host", "a:2,b:2", "-n", "4", "--oversubscribe"),
        *("--mca", "btl_tcp_if_include", "10.77.0.0/24"),
        *(sys.executable, "-c", BY_MPI),
    ]
    torchrun = [
        *("env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", sys.executable),
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *("--master-addr=10.77.0.1", "--master-port=29501"),
    ]
    on_a, on_b = (
        shlex.join([*torchrun, f"--node-rank={node}", FIRST_SUM]) for node in (0, 1)
    )
    by_hand = f"ssh b {shlex.quote(on_b)} & {on_a} && wait $!"

    def nbdist_start() -> None:
        with host.console() as console:
            nonlocal begun
            begun = time.perf_counter()
            console.do(START)
            took.append(time.perf_counter() - begun)
            console.do("cluster.stop()")

    found = {}
    for name, argv in {
        "nbdist": None,
        "mpiexec, as horovodrun": by_mpi,
        "torchrun by hand": ["sh", "-c", by_hand],
    }.items():
        took: list[float] = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            if argv is None:
                nbdist_start()
            else:
                host.run(*argv, timeout_s=120.0)
                took.append(time.perf_counter() - begun)
        found[name] = statistics.median(took)
        print(name, took, flush=True)
    return found


def main() -> int:
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    results: dict[str, Any] = {"start": {}, "ddp": {}, "edit": {}}
    with HostNetwork(("a", "b", "laptop"), equal(3)) as network:
        for host in network.hosts.values():
            host.write(FIRST_SUM, BY_TORCHRUN)
        results["start"] = starts(network["a"])
        with network["a"].console() as console:
            console.do(START + DDP)
            for rate in RATES:
                for host in network.hosts.values():
                    host.slow(rate)
                for name, group in (("nbdist", "None"), ("gloo", "gloo")):
                    code = f"print(steps({STEPS}, {group}))"
                    console.do(f"found = cluster.execute({code!r})")
                    seconds = console.value("max(float(r.stdout) for r in found)")
                    results["ddp"][f"{name}, {rate}/s"] = seconds
                    print(rate, name, seconds, flush=True)
            console.do("cluster.stop()")
        laptop = network["laptop"]
        laptop.write(f"{PROJECT}/helper.py", "value = 0")
        fill = f"cd {PROJECT} && for i in $(seq {FILES}); do echo $i > $i.txt; done"
        laptop.run("sh", "-c", fill)
        with laptop.console() as console:
            console.do(SYNC)
            for rate in reversed(RATES):
                for host in network.hosts.values():
                    host.slow(rate)
                times = console.value(f"[edited(n) for n in range(1, {EDITS + 1})]")
                results["edit"][f"{rate}/s"] = [statistics.median(times), max(times)]
                print(rate, times, flush=True)
            console.do("cluster.stop()")
    report.save("host_work", results, text_of(results))
    return 0


def text_of(results: dict[str, Any]) -> str:
    rows = [
        [f"start and first sum: {name}", f"{seconds:.2f} s"]
        for name, seconds in results["start"].items()
    ]
    rows += [
        [f"step of DDP: {name}", f"{seconds * 1e3:.0f} ms"]
        for name, seconds in results["ddp"].items()
    ]
    rows += [
        [
            f"edit of a module to the end of the cell, `--sync .`, {rate}",
            f"{median:.2f} s, at most {most:.2f} s",
        ]
        for rate, (median, most) in results["edit"].items()
    ]
    return report.table(["4 ranks on 2 hosts", ""], rows) + (
        f"\n\nStarts: the median of {REPEATS}; nbdist with its checks of the hosts and "
        f"no fork server that runs already; the others until their processes have "
        f"ended. DDP: a linear layer of 4 MB, the best of "
        f"{STEPS - 2} steps, of the slowest rank. Edit: {EDITS} edits in a folder of "
        f"{FILES:,} files, with the notebook on a third host."
    )


if __name__ == "__main__":
    sys.exit(main())
