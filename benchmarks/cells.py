"""Empty cells, calls and printed lines on 1, 2, 4 and 8 ranks, beside ipyparallel.

Cells are timed from outside the notebook's kernel, calls within it.

If BENCH_MONARCH_PYTHON names an interpreter with the packages torchmonarch and
ipykernel, PyTorch Monarch takes part: a kernel of that interpreter calls an empty
endpoint of an actor on each of n local processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager, start_new_kernel

from benchmarks import report
from benchmarks.measure import Times, alternate, summary

SIZES = (1, 2, 4, 8)
REPEATS = 100
WARMUPS = 10
LINES = 10_000
LINES_REPEATS = 7
CELL_TIMEOUT_S = 120

SETUP = """
from benchmarks.peer import ipyparallel_client
peer = ipyparallel_client({n})
client = peer.__enter__()  # which gives this kernel %%px, blocking, on all engines
view = client[:]
view.scatter("rank", range({n}), flatten=True, block=True)
%load_ext nbdist
%dist_start -n {n} --device cpu
from nbdist.session import running_cluster
cluster = running_cluster()
def nothing():
    return None
"""
CLOCK = """
from time import perf_counter
def seconds(call):
    begun = perf_counter()
    call()
    return perf_counter() - begun
"""
PRINT = f"for i in range({LINES}): print(rank, i)"
TEARDOWN = """
%dist_stop
peer.__exit__(None, None, None)
"""
MONARCH = """
from monarch.actor import Actor, endpoint, this_host
class Nothing(Actor):
    @endpoint
    def nothing(self):
        return None
processes = this_host().spawn_procs(per_host={{"ranks": {n}}})
actors = processes.spawn("nothing", Nothing)
actors.nothing.call().get()
"""
MONARCH_CALL = "actors.nothing.call().get()"
MONARCH_TEARDOWN = "processes.stop().get(); None"


class Kernel:
    """A notebook kernel, and how long it takes to answer."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client

    def run(self, code: str) -> float:
        """Seconds from sending a cell to its reply.

        Raises:
            RuntimeError: The cell failed.
        """
        begun = time.perf_counter()
        self._execute(code)
        return time.perf_counter() - begun

    def call(self, expression: str) -> float:
        """Seconds that an expression takes in the kernel, as the kernel measures them.

        Raises:
            RuntimeError: It raised.
        """
        timed = f"seconds(lambda: {expression})"
        reply = self._execute("", user_expressions={"seconds": timed})
        value = reply["content"]["user_expressions"]["seconds"]
        if value["status"] != "ok":
            raise RuntimeError(f"{expression}: {value}")
        return float(value["data"]["text/plain"])

    def _execute(self, code: str, **options: Any) -> dict[str, Any]:
        """The kernel's reply to a cell."""
        sent = self._client.execute(code, store_history=False, **options)
        while True:
            reply = self._client.get_shell_msg(timeout=CELL_TIMEOUT_S)
            if reply["parent_header"]["msg_id"] == sent:
                break
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{code}: {reply['content']}")
        return dict(reply)


@contextmanager
def running_kernel(
    manager: KernelManager, client: BlockingKernelClient, setup: str, teardown: str
) -> Iterator[Kernel]:
    """A started kernel that has run a setup, and ends with a teardown."""
    try:
        kernel = Kernel(client)
        try:
            kernel.run(CLOCK + setup)
            yield kernel
        finally:
            kernel.run(teardown)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


class KernelOf(KernelManager):
    """The manager of a kernel of another interpreter.

    Args:
        python: The interpreter's path.
    """

    def __init__(self, python: str) -> None:
        super().__init__()
        self._python = python

    @property
    def kernel_spec(self) -> KernelSpec:
        """How to start the kernel."""
        words = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=[self._python, *words], language="python")


def monarch_kernel(python: str, n: int) -> Any:
    """A kernel with n of Monarch's actors, as a context."""
    manager = KernelOf(python)
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=CELL_TIMEOUT_S)
    return running_kernel(manager, client, MONARCH.format(n=n), MONARCH_TEARDOWN)


def measure(n: int) -> tuple[Times, Times]:
    """Times of empty cells and calls, and of cells that print."""
    with ExitStack() as kernels:
        of_both = running_kernel(*start_new_kernel(), SETUP.format(n=n), TEARDOWN)
        kernel = kernels.enter_context(of_both)
        variants: dict[str, Callable[[], float]] = {
            "%%distributed": lambda: kernel.run("%%distributed\npass"),
            "%%px": lambda: kernel.run("%%px\npass"),
            "the kernel alone": lambda: kernel.run("pass"),
            "cluster.run": lambda: kernel.call("cluster.run(nothing)"),
            "apply_sync": lambda: kernel.call("view.apply_sync(nothing)"),
        }
        if python := os.environ.get("BENCH_MONARCH_PYTHON"):
            monarch = kernels.enter_context(monarch_kernel(python, n))
            variants |= {
                "Monarch's cell": lambda: monarch.run(MONARCH_CALL),
                "Monarch's call": lambda: monarch.call(MONARCH_CALL),
            }
        printing = {
            "%%distributed": lambda: kernel.run(f"%%distributed\n{PRINT}"),
            "%%px": lambda: kernel.run(f"%%px\n{PRINT}"),
        }
        return (
            alternate(variants, REPEATS, WARMUPS),
            alternate(printing, LINES_REPEATS),
        )


def main() -> None:
    results = {n: measure(n) for n in SIZES}
    names = list(results[SIZES[0]][0])
    rows = [[str(n), *(summary(results[n][0][name]) for name in names)] for n in SIZES]
    printed = list(results[SIZES[0]][1])
    printed_rows = [
        [str(n), *(summary(results[n][1][name], "s") for name in printed)]
        for n in SIZES
    ]
    monarch = (
        " Monarch's call is `.call().get()` of an actor's empty endpoint on as many "
        "local processes, and its cell holds this call."
        if "Monarch's call" in names
        else ""
    )
    report.save(
        "cells",
        results,
        report.table(["ranks", *names], rows)
        + f"\n\nMedian of {REPEATS} cells that hold `pass` (and the middle half of "
        "them), from the request to the kernel until its reply; and of as many calls "
        "of an empty function, timed in the kernel. The clusters run beside each "
        f"other and take turns.{monarch}\n\n{LINES:,} lines of each rank:\n\n"
        + report.table(["ranks", *printed], printed_rows)
        + f"\n\nMedian of {LINES_REPEATS} cells, until the kernel's reply, which "
        "follows all of the output.",
    )


if __name__ == "__main__":
    main()
