"""Puts the backend "nbdist" in the place of gloo, for PyTorch's own cases.

A case of PyTorch starts its own processes and asks for "gloo" by name.
`replace_gloo` makes `init_process_group` and `new_group` take "nbdist" for it. A
process joins MPI when it makes its first process group.
"""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal import common_distributed

from nbdist.collectives import Group, set_default_group
from nbdist.collectives.torch_backend.registration import register
from nbdist.engine import torchrun_bootstrap
from nbdist.ipc.ports import free_ports

from mpi4py import MPI  # isort: skip # nbdist decides when it is initialised

__all__ = ["fork_ranks", "replace_gloo"]

USED = "NBDIST_UPSTREAM_USED"
"""The variable with the path of a file that exists once a case has made a group."""
_place: tuple[int, int] | None = None
"""The rank of this process, and the number of ranks, if the case has started it."""


def fork_ranks() -> None:
    """Make the ranks of a case forks of its process, which has imported everything."""
    cases = common_distributed.MultiProcessTestCase
    run_test = cases.run_test
    context = common_distributed.torch.multiprocessing.get_context("fork")

    def spawn(self: Any) -> None:
        _choose_port()
        self._start_processes(context.Process)

    @functools.wraps(run_test)
    def run_and_leave(self: Any, *args: Any) -> None:
        global _place
        _place = self.rank, int(self.world_size)
        run_test(self, *args)
        atexit._run_exitfuncs()  # a forked process has none by itself

    cases._spawn_processes = spawn
    cases.run_test = run_and_leave


def replace_gloo() -> None:
    """Make every request for gloo one for nbdist."""
    register()
    init, new_group = c10d.init_process_group, c10d.new_group

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kw: Any) -> None:
        named = _replaced(backend or "gloo")
        if named == "nbdist":
            _join(_argument(kw, args, "rank", 3), _argument(kw, args, "world_size", 2))
        init(named, *args, **kw)

    @functools.wraps(new_group)
    def replaced_new_group(*args: Any, **kw: Any) -> Any:
        if len(args) > 2:
            args = (*args[:2], _replaced(args[2]), *args[3:])
        elif kw.get("backend"):
            kw["backend"] = _replaced(kw["backend"])
        return new_group(*args, **kw)

    for module in (dist, c10d):
        module.init_process_group = init_process_group
        module.new_group = replaced_new_group


def _replaced(backend: str | None) -> str | None:
    return (
        "nbdist" if backend in ("gloo", "cpu:gloo", "cpu:gloo,cuda:nccl") else backend
    )


def _argument(kw: dict[str, Any], args: tuple[Any, ...], name: str, at: int) -> int:
    """An argument of `init_process_group`, counted after its backend."""
    value = kw.get(name, args[at] if len(args) > at else -1)
    return int(value)


def _join(rank: int, size: int) -> None:
    """Join the MPI world of the case, once."""
    Path(os.environ[USED]).touch()
    if MPI.Is_initialized():
        return
    started = _place or (0, 1)
    rank, size = (started[0] if rank < 0 else rank), (started[1] if size < 0 else size)
    before = dict(os.environ)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": before.get("NBDIST_UPSTREAM_PORT") or str(free_ports(1)[0]),
    }
    torchrun_bootstrap.join_mpi()
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name)
        if name in before:
            os.environ[name] = before[name]
    set_default_group(Group(MPI.COMM_WORLD))


def _choose_port() -> None:
    os.environ["NBDIST_UPSTREAM_PORT"] = str(free_ports(1)[0])
