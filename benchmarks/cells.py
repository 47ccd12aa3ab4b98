"""An empty cell on 1, 2, 4 and 8 ranks, timed from outside the notebook's kernel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

from benchmarks import report
from benchmarks.measure import Times, alternate, summary

SIZES = (1, 2, 4, 8)
REPEATS = 100
WARMUPS = 10
CELL_TIMEOUT_S = 120

SETUP = """
from benchmarks.peer import ipyparallel_client
peer = ipyparallel_client({n})
client = peer.__enter__()  # which gives this kernel %%px, blocking, on all engines
%load_ext nbdist
%dist_start -n {n} --device cpu
"""
TEARDOWN = """
%dist_stop
peer.__exit__(None, None, None)
"""


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
        sent = self._client.execute(code, store_history=False)
        while True:
            reply = self._client.get_shell_msg(timeout=CELL_TIMEOUT_S)
            if reply["parent_header"]["msg_id"] == sent:
                break
        seconds = time.perf_counter() - begun
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{code}: {reply['content']}")
        return seconds


@contextmanager
def kernel_with_clusters(n: int) -> Iterator[Kernel]:
    """A kernel that has both clusters, each of n ranks."""
    manager, client = start_new_kernel()
    try:
        kernel = Kernel(client)
        try:
            kernel.run(SETUP.format(n=n))
            yield kernel
        finally:
            kernel.run(TEARDOWN)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def measure(n: int) -> Times:
    with kernel_with_clusters(n) as kernel:
        contestants = {
            "%%distributed": lambda: kernel.run("%%distributed\npass"),
            "%%px": lambda: kernel.run("%%px\npass"),
            "the kernel alone": lambda: kernel.run("pass"),
        }
        return alternate(contestants, REPEATS, WARMUPS)


def main() -> None:
    results = {n: measure(n) for n in SIZES}
    names = list(results[SIZES[0]])
    rows = [[str(n), *(summary(results[n][name]) for name in names)] for n in SIZES]
    report.save(
        "cells",
        results,
        report.table(["ranks", *names], rows)
        + f"\n\nMedian of {REPEATS} cells that hold `pass` (and the middle half of "
        "them), from the request to the kernel until its reply; both clusters run "
        "beside each other and take turns.",
    )


if __name__ == "__main__":
    main()
