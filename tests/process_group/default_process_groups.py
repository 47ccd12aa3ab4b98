"""Runs test cases on a rank, each with its own world and default process group."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from mpi4py import MPI

from nbdist.collectives import Group, set_default_group
from nbdist.collectives.torch_backend.registration import register

DEADLINE_S = 20.0


@contextlib.contextmanager
def process_group(store: Path, backend: str = "nbdist") -> Iterator[Group]:
    """A default process group that releases its ranks after the deadline.

    Every rank must enter. `store` is a file that does not exist yet.
    """
    world = MPI.COMM_WORLD
    group = Group(world)
    set_default_group(group)
    register()
    late = TimeoutError(f"a test case took longer than {DEADLINE_S} s")
    timer = threading.Timer(DEADLINE_S, group.abort, [late])
    timer.start()
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(store), world.size),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    try:
        yield group
    finally:
        timer.cancel()
        if dist.is_initialized():
            dist.destroy_process_group()
        group.close()


def run_cases(cases: Mapping[str, Callable[[], None]]) -> dict[str, str | None]:
    """Run each case in its own process group. Every rank must call.

    Returns:
        The traceback of each case that failed on this rank, else None, by case.
    """
    outcomes = {}
    with tempfile.TemporaryDirectory() as own:
        folder = Path(MPI.COMM_WORLD.bcast(own))
        for name, case in cases.items():
            outcomes[name] = _run(case, folder / name)
        meet()  # the folder is shared
    return outcomes


def _run(case: Callable[[], None], store: Path) -> str | None:
    meet()
    try:
        with process_group(store):
            case()
    except Exception:  # noqa: BLE001 - it is the outcome
        return traceback.format_exc()
    return None


def meet() -> None:
    """A barrier with a long timeout, because the ranks of a failed case arrive late."""
    request = MPI.COMM_WORLD.Ibarrier()
    end = time.monotonic() + 2 * DEADLINE_S
    while not request.Test():
        if time.monotonic() > end:
            raise TimeoutError("the other ranks have not arrived")
        time.sleep(0.001)
