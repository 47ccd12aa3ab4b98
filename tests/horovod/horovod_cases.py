"""Runs many test cases in one launch of ranks."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import torch
from mpi4py import MPI

import nbdist
import nbdist.horovod as hvd

Case = Callable[[], None]
DEADLINE_S = 40.0
"""Longer than the timeout of collectives, after which the other ranks continue."""


def run_cases(cases: dict[str, Case]) -> dict[str, str | None]:
    """Run each case between `init` and `shutdown`. Returns its traceback or None."""
    torch.set_num_threads(1)
    nbdist.init()
    outcomes: dict[str, str | None] = {}
    for name, case in cases.items():
        torch.manual_seed(7)
        _wait_for_all_ranks()
        hvd.init()
        try:
            case()
        except BaseException:  # noqa: BLE001 - it is the outcome of the case
            outcomes[name] = traceback.format_exc()
        else:
            outcomes[name] = None
        hvd.shutdown()
    return outcomes


def _wait_for_all_ranks() -> None:
    request = MPI.COMM_WORLD.Ibarrier()
    end = time.monotonic() + DEADLINE_S
    while not request.Test():
        if time.monotonic() > end:
            raise TimeoutError(
                f"the other ranks did not arrive within {DEADLINE_S:g} s"
            )
        time.sleep(0.001)
