"""Profiles one cell of this rank with torch.profiler."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from nbdist.engine.rank import this_rank
from nbdist.wire import CLOCK_MARK, ProfiledOperation, RankProfile

__all__ = ["collect", "order", "profiled"]

MOST_OPERATIONS = 50
WARM_UP = "nbdist: begin"

_ordered: int | None = None
"""The number of steps for which the next cell is profiled."""
_last: _Profiling | None = None


class _Profiling:
    """The profile of a cell, from now to the end of a number of optimizer steps.

    Made and stopped on the main thread, as torch.profiler demands.
    """

    def __init__(self, steps: int) -> None:
        self._most = steps
        self.steps = 0
        self._is_running = True
        activities = [ProfilerActivity.CPU]
        if this_rank().info.device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(activities=activities)
        with _without_notes():
            self.profile.start()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        with record_function(WARM_UP):  # the first one takes longer
            pass
        before_ns = time.time_ns()
        with record_function(CLOCK_MARK):
            pass
        self.marked_ns = (before_ns + time.time_ns()) // 2
        self.clock_offset_ns = time.time_ns() - time.monotonic_ns()
        self.begun_ns = time.monotonic_ns()
        self.ended_ns = 0

    def _after_step(self, *_arguments: object) -> None:
        if threading.get_ident() != this_rank().main_thread:
            return
        self.steps += 1
        if self.steps == self._most:
            self.stop()

    def stop(self) -> None:
        if self._is_running:
            self._is_running = False
            self.ended_ns = time.monotonic_ns()
            self._hook.remove()
            with this_rank().interrupts.deferred(), _without_notes():
                self.profile.stop()


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Drop the lines that torch writes to standard error when a profile begins or ends.

    They begin with "USDT:". Other lines are written after the block.
    """
    kept = os.dup(2)
    with open(os.memfd_create("notes"), "r+b") as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)


def order(steps: int) -> None:
    """Profile the next cell of this rank, up to a number of optimizer steps."""
    global _ordered, _last
    _ordered, _last = steps, None


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Profile the cell that runs in this block, if it was ordered."""
    global _ordered, _last
    steps, _ordered = _ordered, None
    # torch has one profiler at a time, which may be the user's own.
    if steps is None or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        yield
        return
    profiling = _Profiling(steps)
    try:
        yield
    finally:
        profiling.stop()
        _last = profiling


def collect() -> RankProfile | None:
    """Write the trace of the ordered profile, and describe it. Not the main thread.

    Returns:
        None if the cell has not run, or has not ended. It is then not profiled.
    """
    global _ordered, _last
    done, _ordered, _last = _last, None, None
    if done is None:
        return None
    rank = this_rank()
    path = rank.run_dir / f"profile-{rank.info.name}.json"
    done.profile.export_chrome_trace(str(path))
    averages = sorted(
        done.profile.key_averages(),
        key=lambda each: -each.self_cpu_time_total - each.self_device_time_total,
    )
    return RankProfile(
        path=str(path),
        pid=os.getpid(),
        steps=done.steps,
        begun_ns=done.begun_ns,
        ended_ns=done.ended_ns,
        clock_offset_ns=done.clock_offset_ns,
        marked_ns=done.marked_ns,
        operations=tuple(
            ProfiledOperation(
                each.key,
                each.count,
                each.self_cpu_time_total / 1e6,
                each.self_device_time_total / 1e6,
            )
            for each in averages[:MOST_OPERATIONS]
            if each.key not in (WARM_UP, CLOCK_MARK)
        ),
    )
