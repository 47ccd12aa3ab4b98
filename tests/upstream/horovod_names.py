"""Answers `import horovod.torch` with nbdist.horovod, and runs a case on ranks."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from case_file import FAILED, PASSED, SKIPPED, Outcome
from case_file import run as run_here
from forked import Ended, Forked, first_ended

import nbdist.horovod.basics
import nbdist.horovod.optimizer  # so that the ranks have it when they are forked
from nbdist.ipc.ports import free_ports

__all__ = ["install", "run"]

GRACE_S = 5.0
"""How long the other ranks may take to end after one has failed."""


def install() -> None:
    """Make the modules that Horovod's test files import."""
    # The cases build each optimizer of the module torch.optim over vectors. Muon, which
    # is newer than the cases, takes matrices alone.
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "newer"
    operations = nbdist.horovod
    for name in ("horovod", "horovod.runner", "horovod.runner.util"):
        sys.modules[name] = ModuleType(name)
    sys.modules["horovod"].torch = operations  # type: ignore[attr-defined]
    sys.modules["horovod.torch"] = sys.modules["horovod.torch.mpi_ops"] = operations
    threads: Any = ModuleType("horovod.runner.util.threads")
    threads.in_thread = _in_thread
    sys.modules["horovod.runner.util.threads"] = threads
    sys.modules["mock"] = mock


def _in_thread(target: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def run(case: unittest.TestCase, *, n: int) -> Outcome:
    """Run the case on `n` ranks. The first one that does not pass decides."""
    os.environ |= {
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "HOROVOD_SIZE": str(n),  # as horovodrun sets it
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
    }
    ranks = [Forked(lambda rank=rank: _run_rank(case, rank)) for rank in range(n)]
    left = list(ranks)
    found: list[Outcome] = []
    while left:
        failed = any(outcome.kind == FAILED for outcome in found)
        ended = first_ended(left, GRACE_S if failed else 3600)
        rank = ended or left[0]
        left.remove(rank)
        found.append(_outcome(ranks.index(rank), rank.wait(0)))
    failures = [each for each in found if each.kind == FAILED]
    if failures:
        return failures[0]
    return next((each for each in found if each.kind == SKIPPED), Outcome(PASSED))


def _run_rank(case: unittest.TestCase, rank: int) -> Outcome:
    ranks = ("RANK", "LOCAL_RANK", "HOROVOD_RANK")  # the last one is horovodrun's
    os.environ |= {name: str(rank) for name in ranks}
    outcome = run_here(case)
    if outcome.kind != FAILED:
        atexit._run_exitfuncs()  # a forked process has none by itself
    return outcome


def _outcome(rank: int, ended: Ended) -> Outcome:
    outcome = ended.value or Outcome(FAILED, f"{ended.failure}\n{ended.text}")
    if outcome.kind == FAILED:
        return Outcome(FAILED, f"rank {rank}: {outcome.reason}")
    return outcome
