"""A program that uses a cluster in a hostile environment.

    python -m tests.clusters.hostile_work [clock | full | umask]

It prints "works" at the end. test_hostile_environment.py runs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from nbdist import Cluster
from tests.processes import wait_until

REDUCE = "x = torch.ones(3) * (rank + 1); dist.all_reduce(x)"
HOUR_S = 3600.0


def main(during: str) -> None:
    """Start, compute, push, pull, replace a rank, stop."""
    all_between = {
        "full": fill_the_disk,
        "clock": move_the_clock,
        "umask": take_permissions,
    }
    between = all_between.get(during, nothing)
    with Cluster(n=2, device="cpu", threads=1, timeout_s=100) as cluster:
        cluster.on_note = print
        print(*(info.started for info in cluster.infos), sep="\n")
        compute(cluster)
        between(cluster, 1)
        compute(cluster)
        cluster.execute("kept = rank")
        if during == "full":
            take_all_space()
        os.kill(cluster.ranks[1].pid, signal.SIGKILL)
        wait_until(lambda: 1 in cluster.died())
        assert "SIGKILL" in str(cluster.died()[1]), cluster.died()
        if during == "full":
            take_all_space()  # what the dead rank has left free, too
        compute(cluster)
        assert cluster["kept"] == [0, 0]  # the survivor's, on the newcomer too
        between(cluster, -2)
        compute(cluster)
    print("works")


def compute(cluster: Cluster) -> None:
    """Run a collective, and copy a small value and a value that is sent in a file."""
    result = cluster.execute(REDUCE + "\nprint('sum', int(x[0]))", timeout_s=60)
    assert [result[rank].stdout for rank in range(2)] == ["sum 3\n"] * 2, result
    cluster.push(small=[1, 2], large=b"x" * 3_000_000)
    assert cluster["small, len(large), int(x[0])"] == [([1, 2], 3_000_000, 3)] * 2


def take_permissions(cluster: Cluster, times: int) -> None:
    """Have only root open what the ranks create."""
    cluster.execute("import os; os.umask(0o777)")
    compute(cluster)
    cluster.execute("dist.barrier(dist.new_group([0, 1]))", timeout_s=60)


def nothing(cluster: Cluster, times: int) -> None:
    """Leave the environment as it is."""


def fill_the_disk(cluster: Cluster, times: int) -> None:
    """Fill /tmp to the last byte, and print what no disk has room for."""
    run_dir = Path(cluster.infos and cluster._live().run_dir)
    assert run_dir.parent == Path("/tmp"), run_dir
    take_all_space()
    result = cluster.execute("print('y' * 10_000_000)", timeout_s=60)
    for rank in range(2):
        assert result[rank].stdout.startswith("y" * 999_999), result[rank]
        assert re.search(r"the last 9\.0 MB .* are lost", result[rank].stderr)
    # MPI's own messages, through memory that Open MPI maps from files in /tmp.
    cluster.execute(
        "for size in (100, 10_000, 1_000_000):\n"
        "    ones = torch.ones(size).numpy()\n"
        "    for _ in range(50):\n"
        "        nbdist.comm().Allreduce(ones, ones.copy())",
        timeout_s=60,
    )


def take_all_space() -> None:
    """Fill /tmp to the last byte."""
    with contextlib.suppress(OSError), open("/tmp/filler", "ab", 0) as filler:
        while True:
            filler.write(b"x" * 4096)
    free = os.statvfs("/tmp").f_bavail
    assert free == 0, free


def move_the_clock(cluster: Cluster, times: int) -> None:
    """Move the wall clock by some hours while a rank waits in a collective."""

    def jump() -> None:
        waits = threading.Event()
        while cluster.status()[0]["what"] is None:  # type: ignore[index]
            waits.wait(0.05)
        waits.wait(0.5)
        set_clock(times * HOUR_S)

    jumps = threading.Thread(target=jump)
    jumps.start()
    cluster.execute(
        "import time\n"
        "before, start = time.time(), time.monotonic()\n"
        f"while rank == 1 and abs(time.time() - before) < {HOUR_S / 2}:\n"
        "    assert time.monotonic() < start + 30, 'the clock did not jump'\n"
        "    time.sleep(0.02)\n" + REDUCE,
        timeout_s=60,
    )
    jumps.join()


def set_clock(offset_s: float) -> None:
    """Set the offset that the preloaded library adds to every process's wall clock."""
    with open(os.environ["FAKE_CLOCK"], "r+b") as file:  # it is mapped: never shorter
        file.write(struct.pack("d", offset_s))


Between = Callable[[Cluster, int], None]

if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
