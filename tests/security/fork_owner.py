"""A program that runs a cluster of forked ranks as an ordinary user.

It prints a line of JSON once the cluster runs: the pids of all its processes, its own
among them. It ends when its standard input closes.
"""

from __future__ import annotations

import json
import os
import sys

import psutil

import nbdist
from nbdist.ipc.fork_messages import FORKED


def main() -> None:
    """Run a cluster until standard input closes."""
    with nbdist.Cluster(n=2, device="cpu", threads=1) as cluster:
        assert {info.started for info in cluster.infos} == {FORKED}
        cluster.execute("x = torch.ones(1); nbdist.all_reduce(x)")
        below = psutil.Process().children(recursive=True)
        print(json.dumps([os.getpid(), *(p.pid for p in below)]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
