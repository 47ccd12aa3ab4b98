"""Changes the members of the world: ranks that have died, that leave, or that join.

All ranks that stay carry out one `wire.Change` together. They shrink the communicator
to the ranks that live (MPI's User-Level Failure Mitigation: `MPIX_Comm_revoke`, then
`MPIX_Comm_shrink`; see Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013). Then they spawn the new ranks and merge with them.

A change can fail at any point, because a further rank dies. The notebook then cancels
the change on all ranks and sends another one. Every change starts with the communicator
of the last change that all ranks completed, whatever a failed change has done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbdist.collectives import close_groups
from nbdist.engine import torch_group, world
from nbdist.engine.rank import this_rank
from nbdist.engine.revocation import revoke
from nbdist.errors import ChangeFailed, ClusterError
from nbdist.ipc import folders, ports, private_files
from nbdist.ipc.locks import Event, Future
from nbdist.ipc.prctl import name_process
from nbdist.wire import Change, RankInfo

__all__ = ["cancel", "change"]


class _Attempt:
    """A change that this rank carries out. The control thread may cancel it."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._cancelled = Future[Any]()
        self._comms: list[Any] = []
        self._merges = False
        self._lock = threading.Lock()

    def own(self, comm: Any) -> Any:
        """Register a communicator, which a cancellation revokes; return it.

        Raises:
            ClusterError: The change is cancelled, and the communicator revoked.
        """
        with self._lock:
            self._comms.append(comm)
        if self._cancelled.done():
            revoke(comm)
            self._cancelled.result()
        return comm

    def cancel(self, reason: str) -> None:
        """Release this rank from the change, with an error."""
        with self._lock:
            if not self._cancelled.done():
                self._cancelled.set_exception(ClusterError(reason))
            comms = list(self._comms)
        for comm in comms:
            revoke(comm)

    def merge(self, bridge: Any) -> Any:
        """Merge with the processes at the other end of an intercommunicator.

        Raises:
            ClusterError: The change is cancelled. A thread that was left behind must
                not merge, beside the main thread's next change.
        """
        with self._lock:
            if self._cancelled.done():
                self._cancelled.result()
            self._merges = True
        return bridge.Merge(high=False)

    def wait_for(self, work: Callable[[], Any]) -> Any:
        """Run `work` on a thread; its result. A cancellation leaves the thread behind.

        A process that spawns others waits for them in PMIx. Revoking a communicator
        does not end that wait.

        Raises:
            ChangeFailed: The change was cancelled during a merge. This rank cannot
                make another change.
        """

        def run() -> None:
            try:
                value = work()
            except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
                outcome.set_exception(error)
            else:
                outcome.set_result(value)

        outcome = Future[Any]()
        ended = Event()
        for future in (outcome, self._cancelled):
            future.add_done_callback(lambda _: ended.set())
        threading.Thread(target=run, name="nbdist-spawn", daemon=True).start()
        ended.wait()
        if self._cancelled.done() and self._merges:
            # Open MPI numbers communicators one after the other. A merge with a process
            # that died in it may never get its number, on some ranks only. Even if
            # revoking ends it, the next communicator may wait for ever.
            raise ChangeFailed("the change was cancelled while it merged", stuck=True)
        return (self._cancelled if self._cancelled.done() else outcome).result()


_attempt: _Attempt | None = None
_cancelled = 0
"""The generation of the last change that was cancelled."""


def cancel(generation: int, reason: str) -> None:
    """End the change to this generation on this rank, with an error.

    Any thread may call. If the rank has not begun the change, it ends as it begins. A
    completed change stays. No later change builds on a cancelled one.
    """
    global _cancelled
    _cancelled = generation  # before `change` looks at it
    attempt = _attempt
    if attempt is not None and attempt.generation == generation:
        attempt.cancel(reason)


def change(plan: Change) -> RankInfo | None:
    """Make the next generation of the world. Every living rank must call.

    The groups of the old generation are closed, torch's groups too. Variables stay.

    Returns:
        This rank's new description; None if it leaves the world.

    Raises:
        MPI.Exception: A rank has died meanwhile.
        ClusterError: The change was cancelled.
    """
    global _attempt
    _attempt = attempt = _Attempt(plan.generation)
    if plan.generation <= _cancelled:
        attempt.cancel("the change was cancelled before it began")
    try:
        with private_files.reopenable():
            return _carry_out(plan, attempt)
    finally:
        _attempt = None


def _carry_out(plan: Change, attempt: _Attempt) -> RankInfo | None:
    rank = this_rank()
    ports.cut_off(plan.lost)
    close_groups()
    torch_group.finish()
    comm = world.communicator_of(plan.base)
    comm.Revoke()
    # Also if the change is cancelled: other ranks may be in it, and cannot leave it.
    comm = attempt.own(comm.Shrink())
    torch_group.stop()  # all ranks have finished
    if plan.addresses:
        ports.set_addresses_of_hosts(plan.addresses)
        ports.confine(os.getpid(), plan.addresses)
    uuid = rank.info.engine_uuid
    if plan.joins:  # no rank leaves, and the order stays
        comm = attempt.wait_for(lambda: _admit(comm, plan, plan.numbers[uuid], attempt))
    else:
        number = plan.numbers.get(uuid)
        comm = _split(comm, number)
        if number is None:
            return None
        attempt.own(comm)
    here = world.enter(comm, plan.generation)
    here.publish_environment()
    owns_gpu = rank.info.device_uuid is not None and not rank.assignment.shares_gpu
    torch_group.start(rank.run_dir, owns_gpu, plan.generation)
    _update_rank(here)
    return rank.info


def _split(comm: Any, number: int | None) -> Any:
    """The communicator of the ranks that stay, in their new order."""
    from mpi4py import MPI

    if number is None:
        return comm.Split(MPI.UNDEFINED)
    return comm.Split(0, key=number)


def _admit(comm: Any, plan: Change, number: int, attempt: _Attempt) -> Any:
    """Spawn the new ranks, and merge with them."""
    from mpi4py import MPI

    program, *command = plan.command
    arguments = [
        [*command, "--join", str(join.rank), str(plan.generation)]
        for join in plan.joins
    ]
    count = len(arguments)
    # The launcher may run on another host, which has this rank's folder nowhere.
    info = MPI.Info.Create({"wdir": "/"})
    with folders.restored():
        if folders.is_gone():  # Open MPI spawns no process there
            os.chdir("/")
        bridge = comm.Spawn_multiple(
            [program] * count, arguments, [1] * count, [info] * count, root=0
        )
    info.Free()
    return attempt.own(attempt.merge(bridge).Split(0, key=number))


def _update_rank(here: world.World) -> None:
    """Update this rank's description, recorder, process name and namespace."""
    rank = this_rank()
    rank.info = replace(
        rank.info,
        rank=here.rank,
        world_size=here.size,
        local_rank=here.local_rank,
        local_world_size=here.local_size,
        generation=here.generation,
        transport=here.group.describe(),
    )
    rank.recorder.rank = here.rank
    name_process(f"nbdist rank {here.rank}")
    rank.tell_namespace()
