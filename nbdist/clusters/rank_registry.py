"""The ranks of a cluster: their descriptions, their deaths, and requests to them."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Set
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, NamedTuple

import psutil

from nbdist.clusters.crash_report import find_crash
from nbdist.clusters.hosts.carrier import Carrier
from nbdist.clusters.ipp_client import Answer
from nbdist.clusters.options import existing_ranks
from nbdist.clusters.startup import Started
from nbdist.clusters.startup_status import ends_within, is_stopped, runs
from nbdist.clusters.supervisor_client import Loss
from nbdist.errors import ClusterError, RankDied
from nbdist.ipc import pidfd
from nbdist.ipc.flight_record import FlightRecord, read_folder, remove_others
from nbdist.ipc.locks import Condition, Future
from nbdist.ipc.private_files import memory_folder
from nbdist.ipc.process_files import (
    read_exit_report,
    read_reason,
    remove_cuda_files,
    stderr_of_cell,
)
from nbdist.ipc.torch_noise import without_noise
from nbdist.wire import RankInfo, format_ranks

__all__ = ["ANSWER_TIMEOUT_S", "RankRegistry"]

ANSWER_TIMEOUT_S = 2.0
KILL_TIMEOUT_S = 60.0
"""Seconds in which the system ends a process that was killed. It gives back the
process's memory first."""
INSTRUCTION_TIMEOUT_S = 30.0
LAST_LINES = 5
ENDING_TIMEOUT_S = 20.0
"""Seconds within which a rank's parent process ends after the rank, however slow."""
STOPPED_TIMEOUT_S = 0.5
"""Seconds after which a parent process that is stopped is not waited for any longer."""
HELPER_TIMEOUT_S = 0.2
"""The most seconds between the end of a rank and that of a helper that ended it."""
POLL_S = 0.5
OUTPUTS = (1, 2)
"""The descriptors of standard output and error."""


class RankRegistry:
    """The ranks of a running cluster, in rank order.

    It notices deaths. It sends requests on the control channel, which a rank's control
    thread also answers while the main thread is busy.

    Args:
        started: The ranks that were started.
        on_death: Called with the rank and its error at each death, on any thread. It
            must return at once.
    """

    def __init__(
        self,
        started: Started,
        on_death: Callable[[int, RankDied], None] = lambda _rank, _error: None,
    ) -> None:
        self.client = started.client
        self.run_dir = started.process_supervisor.run_dir
        self._infos = {info.rank: info for info in started.infos}
        self._report_death = on_death
        self.on_note: Callable[[str], None] = lambda _: None
        """Called with what the user should know while a method waits."""
        self._died: dict[int, RankDied] = {}
        self._ended_on_request: set[str] = set()
        """The processes that `kill` has ended."""
        self.last_locations: dict[int, tuple[str, float]] = {}
        """For each rank, its last known position in a cell, and when (monotonic clock).
        """
        self._last_records: list[FlightRecord] = []
        """The records that were read when all ranks had ended at once."""
        self.lost = ""
        """The reason if all ranks have ended at once, else ""."""
        self._lock = Condition()  # notified of each death
        self.hosts = started.hosts
        self.carrier = Carrier(started.hosts, self.run_dir)
        self._exit_monitor = ExitMonitor(started.infos, self._on_death)
        self._helpers = started.process_supervisor.pids
        self._exit_order = ExitOrder()
        self._watch_order()
        self._pipes = LauncherPipes()
        self._pipes.hold(started.infos)

    def close(self) -> None:
        """Stop watching the ranks. A second close does nothing."""
        self._exit_monitor.close()
        self._exit_order.close()
        self._pipes.close()

    @property
    def infos(self) -> list[RankInfo]:
        """Every rank, including dead ones."""
        return list(self._infos.values())

    @property
    def living(self) -> list[RankInfo]:
        """Every rank whose process runs."""
        died = self.died
        return [info for rank, info in self._infos.items() if rank not in died]

    @property
    def died(self) -> dict[int, RankDied]:
        """The ranks whose processes have ended, each with its error, in rank order."""
        with self._lock:
            return dict(sorted(self._died.items()))

    def __getitem__(self, rank: int) -> RankInfo:
        return self._infos[rank]

    def flight_records(self) -> list[FlightRecord]:
        """What the ranks have recorded, also those that have died since the last change
        of the world."""
        if self._last_records:
            return self._last_records
        folder = memory_folder(self.run_dir)
        if self.hosts is None:
            return read_folder(folder)
        return self.hosts.flight_records(folder)

    def host_of(self, rank: int) -> str:
        return self._infos[rank].host

    def begin(self, infos: Iterable[RankInfo]) -> None:
        """Replace all ranks by those of a new generation."""
        self._exit_monitor.watch(())  # no death of the former ranks counts from here
        before = self.infos
        with self._lock:
            self._infos = {info.rank: info for info in infos}
            self._died.clear()
        with contextlib.suppress(OSError):  # the folder was moved, or is not private
            names = {info.name for info in (*before, *self.infos)}
            remove_others(memory_folder(self.run_dir), names)
        if self.hosts is not None:
            self.hosts.remove_flight_records(names)
        self.last_locations.clear()
        self._watch_order()
        self._exit_monitor.watch(self.infos)
        self._pipes.hold(self.infos)

    def update(self, infos: Iterable[RankInfo]) -> None:
        """Replace the descriptions of these ranks."""
        self._infos |= {info.rank: info for info in infos}

    def select(
        self, ranks: Iterable[int] | None, *, to_kill: bool = False
    ) -> list[int]:
        """Check a selection of ranks, None for all, and return it in rank order.

        Args:
            to_kill: Allow ranks that were killed and have not ended.

        Raises:
            UsageError: A rank does not exist, or the selection is empty.
            RankDied: A rank has died.
        """
        if ranks is None:
            wanted = sorted(self._infos)
        else:
            wanted = existing_ranks(ranks, len(self._infos))
        if self.lost:
            raise RankDied(f"{self.lost}: %dist_start starts a new cluster")
        died = self.died
        dead = [rank for rank in wanted if rank in died]
        if dead:
            what = "; ".join(died[rank].summary for rank in dead)
            living = format_ranks(info.rank for info in self.living)
            others = f"-r {living} runs on the others, which keep their variables; "
            raise RankDied(
                f"{what}. {others if living else ''}%dist_stop and %dist_start start "
                "again"
            )
        doomed = {r for r in wanted if self._infos[r].name in self._ended_on_request}
        if doomed and not to_kill:
            raise self._not_ended(doomed)
        return wanted

    def send(self, info: RankInfo, target: str, *args: object) -> Future[Answer]:
        """Call an endpoint in a rank's main thread, as soon as it is idle."""
        return self.client.send(info.engine_uuid, target, *args).reply

    def ask(
        self,
        target: str,
        *args: object,
        ranks: Iterable[int] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> dict[int, Any]:
        """Call an endpoint on living ranks, busy or not, and wait for the answers.

        Args:
            ranks: The ranks to ask; None for all.

        Returns:
            The result of each rank; None for a rank that has died, does not answer in
            time, or raised.
        """
        deadline = time.monotonic() + timeout_s
        chosen = set(self._infos if ranks is None else ranks)
        exchanges = {
            info.rank: self.client.send(info.engine_uuid, target, *args, control=True)
            for info in self.living
            if info.rank in chosen
        }
        answers: dict[int, Any] = dict.fromkeys(sorted(chosen))
        for rank, exchange in exchanges.items():
            try:
                answer = exchange.reply.result(max(0.0, deadline - time.monotonic()))
            except (NoAnswer, RankDied):
                continue
            answers[rank] = answer.value if answer.ok else None
        return answers

    def instruct(self, target: str, *args: object) -> None:
        """Call an endpoint on all living ranks, and check that each succeeds.

        A rank that dies before it answers is skipped.

        Raises:
            ClusterError: The function raised on a rank, or a rank did not answer.
        """
        deadline = time.monotonic() + INSTRUCTION_TIMEOUT_S
        exchanges = {
            info.rank: self.client.send(
                info.engine_uuid,
                target,
                *(self.carrier.to(info.host, each) for each in args),
                control=True,
            )
            for info in self.living
        }
        for rank, exchange in exchanges.items():
            try:
                answer = exchange.reply.result(max(0.0, deadline - time.monotonic()))
            except RankDied:
                continue
            except NoAnswer as error:
                raise ClusterError(
                    f"rank {rank} did not answer in {INSTRUCTION_TIMEOUT_S:g} s"
                ) from error
            if not answer.ok:
                ename, evalue, _lines = answer.value
                raise ClusterError(f"rank {rank} refused: {ename}: {evalue}")

    def tell(
        self, target: str, *args: object, ranks: Iterable[int] | None = None
    ) -> None:
        """Call an endpoint on living ranks without a wait. `ranks` None means all."""
        chosen = None if ranks is None else set(ranks)
        for info in self.living:
            if chosen is None or info.rank in chosen:
                self.client.send(info.engine_uuid, target, *args, control=True)

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill the processes of some ranks on request, and wait for their deaths.

        A process with much memory, or one that uses a GPU, takes seconds to end.

        Raises:
            RankDied: A process does not end.
        """
        wanted = set(ranks)
        self._ended_on_request |= {self._infos[rank].name for rank in wanted}
        for rank in wanted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._infos[rank].watched_pid, signal.SIGKILL)
        if self.await_deaths(lambda died: wanted <= died, ANSWER_TIMEOUT_S):
            return
        late = format_ranks(wanted - self.died.keys())
        self.on_note(
            f"rank {late} was killed, and the system has not ended its process yet: "
            f"waits up to {KILL_TIMEOUT_S:g} s"
        )
        if not self.await_deaths(lambda died: wanted <= died, KILL_TIMEOUT_S):
            raise self._not_ended(wanted - self.died.keys())

    def _not_ended(self, ranks: Iterable[int]) -> RankDied:
        late = format_ranks(ranks)
        return RankDied(
            f"rank {late} was killed, and the system has not ended its process: no "
            f"cell runs on it. %dist_restart -r {late} waits again; %dist_stop ends "
            "all ranks"
        )

    def await_deaths(
        self, condition: Callable[[Set[int]], bool], timeout_s: float
    ) -> bool:
        """Wait until a condition holds for the ranks that have died.

        Args:
            condition: Evaluated now and after each death, with the dead ranks.

        Returns:
            Whether it holds; False after `timeout_s`.
        """
        with self._lock:
            return self._lock.wait_for(lambda: condition(self._died.keys()), timeout_s)

    def lose(self, loss: Loss) -> None:
        """Record that all ranks end because a process that they depend on has ended.

        If the process has aborted, a rank that ended before it, or whose parent did, is
        recorded with its own exit code or signal, because it can be the cause.
        """
        with contextlib.suppress(OSError):  # the folder was moved, or is not private
            self._last_records = self.flight_records()  # the folder is removed next
        self.lost = loss.reason
        # Another signal was sent to this process from outside.
        earlier = self._exit_order.ended_before(loss.pid) if loss.aborted else set()
        for info in self.living:
            ended_itself = not loss.is_cause and not psutil.pid_exists(info.watched_pid)
            if ended_itself or earlier & {info.watched_pid, info.parent_pid}:
                error = self._death(info.rank)
            else:
                error = RankDied(loss.reason)
            self._record_death(info.rank, error)

    def _watch_order(self) -> None:
        """Watch the order in which the ranks, their parents and helpers end."""
        ranks = [p for info in self.infos for p in (info.watched_pid, info.parent_pid)]
        self._exit_order.watch([*ranks, *self._helpers])

    def _on_death(self, rank: int) -> None:
        """Record a death. Runs on the exit monitor's thread."""
        if not self._ended_with_helper(self._infos[rank]):
            self._record_death(rank, self._death(rank))

    def _ended_with_helper(self, info: RankInfo) -> bool:
        """Whether a rank ended because a helper process had; `lose` then records it.

        Either the helper ended before the rank, or the rank's parent ended without an
        exit report: a helper's threads end one by one, so a child of a thread may end a
        moment before the helper.
        """
        helpers = set(self._helpers)
        if self._exit_order.ended_before(info.watched_pid) & helpers:
            return True
        deadline = time.monotonic() + HELPER_TIMEOUT_S
        while not runs(info.parent_pid):
            if read_exit_report(self.run_dir, info.name) is not None:
                return False
            if self._exit_order.has_ended(helpers):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(HELPER_TIMEOUT_S / 20)
        return False

    def _record_death(self, rank: int, error: RankDied) -> None:
        with self._lock:
            is_news = rank not in self._died
            self._died.setdefault(rank, error)
            self._lock.notify_all()
        if is_news:
            self._report_death(rank, error)
        self.client.fail(self._infos[rank].engine_uuid, error)

    def _death(self, rank: int) -> RankDied:
        """The error of a dead rank: its exit, and the end of its standard error."""
        info = self._infos[rank]
        if info.pid == info.watched_pid:  # else its own host removes them
            remove_cuda_files(info.pid)
        ending = self._ending(info)
        who = f"rank {rank} (pid {info.pid} on {info.host})"
        if info.name in self._ended_on_request:
            return RankDied(f"{who} was ended, as requested")
        if self.hosts is not None and (why := self.hosts.why_lost(info.host)):
            return RankDied(f"{who} was lost with its host: {why}")
        if (reason := read_reason(self.run_dir, info.name)) is not None:
            return RankDied(f"{who} has ended itself: {reason}")
        summary = f"{who} has died with {ending}"
        text = stderr_of_cell(self.run_dir, info.name)
        if crash := find_crash(text, ending):
            at = f" in {crash.location}" if crash.location else ""
            stack = f"its Python stack:\n{crash.stack}"
            return RankDied(f"{summary}{at}", stack, ending)
        lines = without_noise(text).rstrip().splitlines()[-LAST_LINES:]
        last = "".join(f"\n    {line}" for line in lines)
        return RankDied(
            summary, last and f"the last lines of its stderr:{last}", ending
        )

    def _ending(self, info: RankInfo) -> str:
        """The exit code or signal of a rank, from the exit report of its parent."""
        has_parent = not _ends(info.parent_pid)
        ending = read_exit_report(self.run_dir, info.name)  # the parent's last act
        if ending is not None:
            return ending
        if not has_parent:
            return "an unknown exit code, because its parent process has ended too"
        # MPI, and so the other ranks, notice only the end of the parent.
        with contextlib.suppress(ProcessLookupError):
            os.kill(info.parent_pid, signal.SIGKILL)
        return "an unknown exit code, because its parent process does not answer"


def _ends(parent_pid: int) -> bool:
    """Wait until the parent process of a dead rank has ended; False if it does not."""
    deadline = time.monotonic() + ENDING_TIMEOUT_S
    while not ends_within(parent_pid, STOPPED_TIMEOUT_S):
        if is_stopped(parent_pid) or time.monotonic() > deadline:
            return False
    return True


class ExitMonitor:
    """Calls `on_death(rank)` on its own thread, once for each rank that ends."""

    def __init__(
        self, infos: Iterable[RankInfo], on_death: Callable[[int], None]
    ) -> None:
        self._on_death = on_death
        self._wake_read, self._wake_write = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self.watch(infos)

    def watch(self, infos: Iterable[RankInfo]) -> None:
        """Watch these ranks and no others.

        A rank whose process descriptor this process cannot have is looked at twice a
        second. What else this needs is opened once, so that a process without a free
        descriptor can change the ranks, and still notices their deaths.
        """
        self._end()
        polled, ended = [], []
        for info in infos:
            try:
                descriptor = pidfd.opened(info.watched_pid)
            except ProcessLookupError:
                ended.append(info)
            else:
                if descriptor is None:
                    polled.append(info)
                else:
                    self._selector.register(descriptor, selectors.EVENT_READ, info.rank)
        self._thread = threading.Thread(
            target=self._run,
            args=(polled, ended),
            name="nbdist-exit-monitor",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching. A second close does nothing."""
        if self._thread is not None:
            self._end()
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _end(self) -> None:
        """End the thread, and close the descriptors of the ranks."""
        if self._thread is None:
            return
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._thread = None
        os.read(self._wake_read, 1)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._forget(key.fd)

    def _forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def _run(self, polled: list[RankInfo], ended: list[RankInfo]) -> None:
        for info in ended:
            self._on_death(info.rank)
        while True:
            ready = self._selector.select(POLL_S if polled else None)
            if any(key.data is None for key, _ in ready):
                return
            for key, _ in ready:
                self._forget(key.fd)
                self._on_death(key.data)
            ended = [info for info in polled if not runs(info.watched_pid)]
            polled = [info for info in polled if info not in ended]
            for info in ended:
                self._on_death(info.rank)


class ExitOrder:
    """The order in which processes end.

    On Linux, an epoll instance returns process descriptors in the order in which they
    have become readable. Where there are none, the order is unknown.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll() if sys.platform == "linux" else None
        self._descriptors: dict[int, int] = {}
        """The descriptors of running processes, by pid."""
        self._ended: list[int] = []
        """The pids of ended processes, in the order of their ends."""
        self._lock = threading.Lock()

    def watch(self, pids: Iterable[int]) -> None:
        """Watch these processes and no others. Ended processes are skipped."""
        wanted = set(pids)
        with self._lock:
            if self._epoll is None:
                return
            self._hear(self._epoll)
            self._ended = [pid for pid in self._ended if pid in wanted]
            for pid in self._descriptors.keys() - wanted:
                self._forget(self._epoll, pid)
            for pid in wanted - self._descriptors.keys() - set(self._ended):
                with contextlib.suppress(ProcessLookupError):
                    descriptor = pidfd.opened(pid)
                    if descriptor is not None:
                        self._descriptors[pid] = descriptor
                        self._epoll.register(descriptor, select.EPOLLIN)

    def ended_before(self, pid: int) -> set[int]:
        """The processes that ended before this one; none while it runs."""
        with self._lock:
            if self._epoll is not None:
                self._hear(self._epoll)
            ended = self._ended
            return set(ended[: ended.index(pid)]) if pid in ended else set()

    def has_ended(self, pids: Iterable[int]) -> bool:
        """Whether one of these processes has ended."""
        with self._lock:
            if self._epoll is not None:
                self._hear(self._epoll)
            return not set(self._ended).isdisjoint(pids)

    def _hear(self, epoll: select.epoll) -> None:
        """Record which processes have ended since the last call."""
        if not self._descriptors:
            return
        pids = {descriptor: pid for pid, descriptor in self._descriptors.items()}
        # Read all at once: the next call would begin with other descriptors.
        for descriptor, _ in epoll.poll(0, len(pids)):
            self._ended.append(pids[descriptor])
            self._forget(epoll, pids[descriptor])

    def _forget(self, epoll: select.epoll, pid: int) -> None:
        descriptor = self._descriptors.pop(pid)
        epoll.unregister(descriptor)  # a forked child may have it too
        os.close(descriptor)

    def close(self) -> None:
        """Stop watching. A second close does nothing."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
            if self._epoll is not None:
                self._epoll.close()
                self._epoll = None


class _Held(NamedTuple):
    """The pipes of a rank's parent that are kept open."""

    descriptors: list[int]
    info: RankInfo
    sockets: set[str]
    """The inodes of the rank's sockets. One of them is its connection with the
    daemon."""

    @property
    def is_over(self) -> bool:
        """Whether no process has the connection with the daemon any longer."""
        if self.info.pid != self.info.watched_pid or runs(self.info.parent_pid):
            return False  # this host does not know the sockets of another
        return not runs(self.info.pid) and self.sockets.isdisjoint(_tcp_sockets())


class LauncherPipes:
    """Keeps the pipes open that connect the ranks' parents with the MPI launcher.

    Open MPI's daemon (PRRTE 3) forgets a process when it has ended and its output is
    closed. If the rank, or a child that it has forked, is then still connected to the
    daemon, the daemon stops serving all ranks. While another process has the output
    open, the daemon remembers the ended process, and reports its end to the other
    ranks.

    Only on Linux can a process open another process's pipes. On other systems this
    class does nothing.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], _Held] = {}

    def hold(self, infos: Iterable[RankInfo]) -> None:
        """Keep the pipes of these ranks open, and close those of ranks that have left
        the world and whose connection with the daemon is closed."""
        ranks = {(info.name, info.parent_pid): info for info in infos}
        for key, held in list(self._held.items()):
            if key not in ranks and held.is_over:
                self._close(self._held.pop(key))
        for key, info in ranks.items():
            if key not in self._held:
                descriptors = list(_opened(info.parent_pid))
                self._held[key] = _Held(descriptors, info, _sockets_of(info.pid))

    def close(self) -> None:
        """Close all pipes. A second close does nothing."""
        for held in self._held.values():
            self._close(held)
        self._held.clear()

    def _close(self, held: _Held) -> None:
        for descriptor in held.descriptors:
            os.close(descriptor)


def _opened(pid: int) -> Iterable[int]:
    for output in OUTPUTS:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            path = f"/proc/{pid}/fd/{output}"
            yield os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                kind, _, inode = os.readlink(entry.path).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def _tcp_sockets() -> set[str]:
    """The inodes of all TCP sockets that a process has open."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            found |= {line.split()[9] for line in list(lines)[1:]}
    return found
