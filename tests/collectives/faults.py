"""Calls in which a rank is missing. `test_faults.py` runs this file on ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from mpi4py import MPI
from pretended_hosts import HOSTS_OF_TWO, pretending_hosts

import nbdist.collectives as nc
from nbdist.collectives import group as group_module
from nbdist.collectives.call_timing import gpu_timer
from nbdist.collectives.sync.wait import Check
from nbdist.collectives.transports import select
from nbdist.collectives.transports.hierarchical import HierarchicalTransport
from nbdist.collectives.transports.local import LocalTransport
from nbdist.config import CollectiveConfig
from nbdist.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    WrongProcess,
)

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
"""Releases take about 1 ms; this leaves room for a busy machine. A call that nothing
releases ends after 30 s."""


def run_functions(
    calls: list[tuple[str, tuple[object, ...]]], device: str = "cpu"
) -> list[object]:
    """Run functions of this file in turn. Returns each result or error."""
    torch.set_default_device(device)
    torch.ones(1)  # a device takes its time to begin
    outcomes = []
    for name, arguments in calls:
        try:
            outcomes.append(globals()[name](*arguments))
        except BaseException:  # noqa: BLE001 - it is the outcome
            outcomes.append(RuntimeError(traceback.format_exc()))
        COMM.Barrier()
        nc.close_groups()
    return outcomes


def make_group(transport: str, timeout_s: float | None = 30.0) -> nc.Group:
    name, _, how = transport.partition(", ")
    config = CollectiveConfig(name, timeout_s, compiled=how != "in Python")
    with pretending_hosts(how):
        group = nc.Group(COMM, config=config)
    nc.set_default_group(group)
    if torch.get_default_device().type == "cuda":
        nc.all_reduce(torch.ones(1))  # the first finds the transports for GPUs
    return group


@contextmanager
def when_blocked(action: Callable[[], object]) -> Iterator[None]:
    """Call `action` in another thread when this process is in a collective."""
    over = threading.Event()

    def watch() -> None:
        while nc.current_call() is None:
            if over.wait(0.001):
                return
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def usable_again(group: nc.Group) -> None:
    group.renew(group.generation + 1)
    tensor = torch.ones(1000)
    nc.all_reduce(tensor)
    assert (tensor == SIZE).all()


BLOCKING: dict[str, Callable[[], object]] = {
    "barrier": nc.barrier,
    "all_reduce": lambda: nc.all_reduce(torch.ones(400_000)),
    "ring": lambda: nc.all_reduce(torch.ones(10), algorithm="ring"),
    "recv": lambda: nc.recv(torch.ones(3), (RANK + 1) % SIZE),
    "handle": lambda: nc.all_reduce(torch.ones(3), async_op=True).wait(),
}


def abort(transport: str) -> None:
    """All ranks except one block, and are aborted from another thread."""
    group = make_group(transport)
    for call in BLOCKING.values():
        COMM.Barrier()
        if RANK > 0:
            error = CollectiveAborted("enough")
            with (
                when_blocked(lambda error=error: group.abort(error)),
                pytest.raises(CollectiveAborted) as caught,
            ):
                call()
            assert "enough" in str(caught.value) or "left it" in str(caught.value)
            with pytest.raises(CollectiveError):
                nc.barrier()
        COMM.Barrier()
        usable_again(group)
    group.close()


def abort_within_hosts() -> None:
    """Rank 0 sends nothing between the hosts. The others wait at different places."""
    with pretending_hosts(HOSTS_OF_TWO):
        group = make_group("auto")
        transport = group.transport("cpu")
        assert isinstance(transport, HierarchicalTransport)
        error = CollectiveAborted("enough")

        def abort() -> None:
            if RANK > 0:
                COMM.recv(source=0)  # it has left the call
                group.abort(error)

        with pytest.MonkeyPatch.context() as patch:
            if RANK == 0:
                fails = Mock(side_effect=KeyboardInterrupt)
                patch.setattr(transport._between, "all_reduce_flat", fails)
            expected = CollectiveAborted if RANK > 0 else KeyboardInterrupt
            with when_blocked(abort), pytest.raises(expected):
                nc.all_reduce(torch.ones(400_000))
        if RANK == 0:
            for peer in range(1, SIZE):
                COMM.send(None, peer)
        assert group.broken
        COMM.Barrier()
        usable_again(group)
        group.close()


def interrupt(transport: str) -> None:
    """SIGINT ends a blocked call of the first rank with KeyboardInterrupt."""
    group = make_group(transport)
    for call in BLOCKING.values():
        COMM.Barrier()
        if RANK == SIZE - 1:
            with (
                when_blocked(lambda: os.kill(os.getpid(), signal.SIGINT)),
                pytest.raises(KeyboardInterrupt),
            ):
                call()
            assert group.broken
        COMM.Barrier()
        usable_again(group)
    group.close()


def leave(transport: str) -> str:
    """In shared memory, the other ranks' error names the interrupted rank."""
    group = make_group(transport)
    if RANK == 0:
        with pytest.raises(CollectiveTimeout):
            nc.barrier(timeout=0.2)
        message = ""
    elif RANK < SIZE - 1:
        with pytest.raises(CollectiveAborted) as caught:
            nc.barrier()
        message = str(caught.value)
    else:
        message = ""
    COMM.Barrier()
    usable_again(group)
    group.close()
    return message


def time_out(transport: str) -> str:
    """The error names the ranks that arrived, and the calls of the other ranks."""
    group = make_group(transport)
    part = group.new([SIZE - 2, SIZE - 1])
    message = ""
    COMM.Barrier()
    if RANK == SIZE - 1:  # waits in another call, which no other rank makes
        with pytest.raises(CollectiveError):
            nc.all_reduce(torch.ones(7), group=part, timeout=2.0)
    elif RANK != SIZE - 2:
        with pytest.raises((CollectiveTimeout, CollectiveAborted)) as caught:
            nc.broadcast(torch.ones(3), 0, timeout=timedelta(seconds=0.5 + RANK))
        message = str(caught.value)
    COMM.Barrier()
    group.close()
    return message


def one_message_is_missing() -> None:
    group = make_group("auto")
    with pytest.raises(CollectiveTimeout, match="recv from rank"):
        nc.recv(torch.ones(3), (RANK + 1) % SIZE, timeout=0.3)
    group.close()


def a_message_of_another_shape() -> None:
    group = make_group("auto")
    if RANK == 0:
        nc.isend(torch.ones(4), 1)
    elif RANK == 1:
        room = torch.zeros(3)
        with pytest.raises(CollectiveMismatch, match="expected 3 elements"):
            nc.recv(room, 0)
        assert (room == 0).all()
    COMM.Barrier()
    group.close()


def tell_where() -> tuple[str, int | None, int | None]:
    """Another thread reads the current call, with its cell and line."""
    group = make_group("auto")
    seen = []

    def look() -> None:
        seen.append(nc.current_call())
        COMM.Isend(b"", 0)

    if RANK == 0:
        thread_of_1 = COMM.Irecv(bytearray(0), 1)
        while not thread_of_1.Test():
            time.sleep(0.001)
        nc.barrier()
    elif RANK == 1:
        with when_blocked(look):
            name = "<ipython-input-42-0ab>"
            exec(compile("\n\nnc.barrier()", name, "exec"), {"nc": nc})
    else:
        nc.barrier()
    assert nc.current_call() is None
    group.close()
    call = seen[0] if seen else None
    return ("", None, None) if call is None else (call.operation, call.cell, call.line)


def die(device: str = "cpu") -> None:
    """The last rank is killed in the middle of a collective."""
    torch.set_default_device(device)
    make_group("auto")
    nc.all_reduce(torch.ones(2_000_000))
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    nc.barrier()


def fail_on_a_gpu(transport: str, failing: int) -> None:
    """One rank fails while the ranks connect their GPUs, which there may not be."""
    group = make_group(transport)

    def connect(*arguments: object) -> dict[str, object]:
        swap = arguments[-1]
        swap("one")
        if failing == RANK:
            raise RuntimeError("out of memory")
        swap("two")
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "gpu_transports", connect)
        patch.setattr(gpu_timer, "timing", lambda *_: nullcontext())
        with pytest.raises(RuntimeError, match="out of memory") as failed:
            group.run(
                nc.signature("first_on_gpu", None, None, None, (), "cuda"),
                group._connection.add_gpu,
            )
    if failing != RANK:
        assert str(failed.value).startswith(
            f"rank {failing} could not connect its GPU: RuntimeError"
        )


class Ending(LocalTransport):
    """A transport that must end on all ranks together, and writes down how it ends."""

    ends_together: ClassVar[bool] = True

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []

    def finish(self, check: Check) -> None:
        token = np.zeros(1)
        if RANK == SIZE - 1:  # the last to finish
            for peer in range(SIZE - 1):
                COMM.Recv(token, peer)
        else:
            COMM.Send(token, SIZE - 1)
        self._tell("finish")

    def abort(self) -> None:
        self._tell("abort")

    def close(self) -> None:
        self._tell("close")

    def _tell(self, what: str) -> None:
        self.log.append((what, time.monotonic()))


def close_together(transport: str) -> list[tuple[str, float]]:
    """How a transport ends that all ranks must end together."""
    group = make_group(transport)
    ending = Ending()
    group._connection.transports["cuda"] = {"auto": ending}
    group.close()
    return ending.log


def close_alone(transport: str) -> list[tuple[str, float]]:
    """The same where one rank does not close the group before the others have."""
    group = make_group(transport)
    ending = Ending()
    ending.finish = lambda check: None
    group._connection.transports["cuda"] = {"auto": ending}
    group_module._FINISH_WITHIN_S = 0.2
    if RANK == SIZE - 1:
        COMM.Barrier()
    group.close()
    if RANK != SIZE - 1:
        COMM.Barrier()
    group_module._FINISH_WITHIN_S = 10.0
    return ending.log


def count_messages(algorithm: str) -> list[tuple[int, int, int]]:
    """(elements, messages, elements sent) of all-reduces in the ring on this rank."""
    group = make_group(algorithm)
    ring = group.transport("cpu", algorithm)
    counts = []
    for length in (0, 1, SIZE - 1, SIZE, 1009, 16_383, 16_384, 65_536):
        ring.sent_messages = ring.sent_elements = 0
        nc.all_reduce(torch.ones(length), algorithm=algorithm)
        counts.append((length, ring.sent_messages, ring.sent_elements))
    group.close()
    return counts


def no_group_here() -> None:
    nc.set_default_group(None)
    with pytest.raises(WrongProcess, match="%%distributed"):
        nc.all_reduce(torch.ones(1))
