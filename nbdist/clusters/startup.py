"""Starts the controller and the ranks of a cluster at the same time."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist.clusters import fork_server_client
from nbdist.clusters.greeting import Greeting
from nbdist.clusters.launchers.base import Launcher
from nbdist.clusters.launchers.mpiexec import SEVERAL_HOSTS
from nbdist.clusters.startup_status import (
    EXIT_REPORT_TIMEOUT_S,
    ProcessExit,
    StartupStatus,
    tail_of,
)
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.config import File, ForkConfig, rank_variables
from nbdist.errors import ClusterError, StartError
from nbdist.ipc import folders, private_files, rank_parent
from nbdist.ipc.device_assignment import DeviceAssignment, write_assignments
from nbdist.ipc.fork_messages import SOCKET, STARTED
from nbdist.ipc.locks import Event
from nbdist.ipc.ports import confine
from nbdist.ipc.process_files import describe_exit
from nbdist.wire import RankInfo

if TYPE_CHECKING:
    from nbdist.clusters.hosts.hosts import Hosts
    from nbdist.clusters.ipp_client import IppClient

__all__ = ["Progress", "Started", "start"]

POLL_S = 0.02
LOOK_S_PER_RANK = 0.005
"""Seconds between two looks at the files and the process of a rank. A look takes about
a twentieth of it."""
FIRST_CONNECT_S = 1.0
"""Seconds for which the controller may not answer before failures are looked for."""
ASK_S = 0.5
"""Seconds between two questions which engines have registered."""


@dataclass(frozen=True)
class Progress:
    """The progress of a start."""

    controller: bool
    stages: Mapping[int, str]
    """The stage of each rank that has begun, by rank."""
    ready: int
    assignments: Sequence[DeviceAssignment]
    hosts: Mapping[str, str] = field(default_factory=dict)
    """The state of each other host."""
    waits_for: str = ""
    """What the start waits for before it begins, such as a place in a queue."""


@dataclass(frozen=True)
class Started:
    """The processes and ranks of a cluster that has started."""

    process_supervisor: SupervisorClient
    client: IppClient
    infos: list[RankInfo]
    assignments: Sequence[DeviceAssignment]
    hosts: Hosts | None
    """The hosts of the ranks; None if all are on this host."""


def start(
    launcher: Launcher,
    assignments: Sequence[DeviceAssignment] | Callable[[Hosts], list[DeviceAssignment]],
    file: File,
    variables: Mapping[str, str],
    timeout_s: float,
    on_telemetry: Callable[[Any], None],
    on_progress: Callable[[Progress], None],
    hosts: Hosts | None = None,
) -> Started:
    """Start the controller and every rank, and wait until each of them answers.

    Args:
        launcher: Starts the ranks' processes.
        assignments: The device of each rank; with `hosts`, a function that returns them
            when the hosts are known.
        file: The settings in nbdist.toml.
        variables: Further environment variables for the ranks.
        timeout_s: Seconds within which every rank must answer.
        on_telemetry: Called with each message of the ranks' telemetry.
        on_progress: Called when the progress of the start changes.
        hosts: The hosts of the ranks; None if all ranks are on this host.

    Raises:
        StartError: A rank failed, or did not start in time; nothing is left running.
        UsageError: A host has too few GPUs or cores or too little memory.
    """
    try:
        run_dir = private_files.make_run_folder()
    except OSError as error:
        raise StartError(str(error)) from error
    process_supervisor = SupervisorClient(run_dir)
    try:
        memory = private_files.new_memory_folder()
        process_supervisor.remove_at_end(memory)
        private_files.make_memory_folder(run_dir, memory)
        if hosts is not None:
            hosts.allocate(
                lambda text: on_progress(Progress(False, {}, 0, (), {}, text))
            )
        deadline = time.monotonic() + timeout_s
        if hosts is not None:
            hosts.connect(
                process_supervisor,
                deadline,
                lambda states: on_progress(Progress(False, {}, 0, (), states)),
            )
        if callable(assignments):
            assert hosts is not None
            assignments = assignments(hosts)
        private_files.make_rendezvous_folder(run_dir, len(assignments))
        startup = _Start(process_supervisor, assignments, deadline, on_progress, hosts)
        startup.begin(launcher, file, variables)
        return startup.finish(on_telemetry, timeout_s)
    except BaseException:
        if hosts is not None:
            hosts.end()
        process_supervisor.close()
        raise


class _Start:
    def __init__(
        self,
        process_supervisor: SupervisorClient,
        assignments: Sequence[DeviceAssignment],
        deadline: float,
        on_progress: Callable[[Progress], None],
        hosts: Hosts | None,
    ) -> None:
        self._hosts = hosts
        self._process_supervisor = process_supervisor
        self._run_dir = process_supervisor.run_dir
        self._assignments = assignments
        self._deadline = deadline
        self._on_progress = on_progress
        self._statuses = [
            StartupStatus(self._run_dir, each.rank) for each in assignments
        ]
        self._ready = 0
        self._changed = Event()
        """Set when an engine has registered or answered."""
        self._look_s = LOOK_S_PER_RANK * len(assignments)
        self._shown: Progress | None = None

    def begin(
        self, launcher: Launcher, file: File, variables: Mapping[str, str]
    ) -> None:
        """Start the controller and the ranks at the same time."""
        write_assignments(self._run_dir, self._assignments)
        hosts = self._hosts
        added = {**self._of_launcher(launcher), **variables}
        try:
            server = fork_server_client.serve(
                self._run_dir, {**os.environ, **added}, ForkConfig.read(file)
            )
        except fork_server_client.CannotFork as error:
            started = str(error)
        else:
            started = ""
            self._process_supervisor.attend_rank_host(self._run_dir / SOCKET, server)
        environment = {
            **os.environ,
            **rank_variables(file),
            **added,
            STARTED: started,
            "NBDIST_RUN_DIR": str(self._run_dir),
            "NBDIST_WORK_DIR": folders.current(),
            "NBDIST_PATH": os.pathsep.join(sys.path),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "PYTHONHASHSEED": fork_server_client.hash_seed(),
        }
        if hosts is not None:
            self._start_controller()
            settings = {**rank_variables(file), **variables}
            try:
                hosts.begin(self._assignments, settings, folders.current())
            except ClusterError as error:
                raise StartError(f"{error}") from error
            environment |= hosts.variables()
        argv = launcher.argv(len(self._assignments), rank_parent.command())
        self._process_supervisor.start("mpiexec", argv, environment)
        if hosts is None:
            self._start_controller()

    def _of_launcher(self, launcher: Launcher) -> Mapping[str, str]:
        """The launcher's environment variables for this host."""
        if self._hosts is None:
            return launcher.environment(len(self._assignments), self._run_dir)
        here = [each for each in self._assignments if self._hosts.is_here(each)]
        interface = self._hosts.interface
        variables = launcher.environment(len(here), self._run_dir, interface)
        return {**variables, **SEVERAL_HOSTS}

    def _start_controller(self) -> None:
        controller = ["nbdist.clusters.ipcontroller", str(self._run_dir)]
        self._process_supervisor.start(
            "controller",
            [sys.executable, "-m", *controller],
            dict(os.environ),
            module=controller,
        )

    def finish(self, on_telemetry: Callable[[Any], None], timeout_s: float) -> Started:
        """Connect, and wait for every rank.

        Raises:
            StartError: As for `start`.
        """
        from nbdist.clusters.ipp_client import (
            IppClient,  # slow to import: while the ranks start
        )

        connection = self._run_dir / "security" / "ipcontroller-client.json"
        self._wait(connection.exists, timeout_s)
        if self._hosts is not None:
            of_engines = connection.with_name("ipcontroller-engine.json")
            self._wait(of_engines.exists, timeout_s)
            self._hosts.connect_controller(json.loads(of_engines.read_text()))
        client = self._connect(partial(IppClient, connection, on_telemetry))
        try:
            with client.on_registration(self._changed.set):
                self._await_engines(client, timeout_s)
            infos = self._greet(client, timeout_s)
            launcher = self._process_supervisor.pid("mpiexec")
            if launcher is not None:
                confine(launcher)
            supervisor, assignments = self._process_supervisor, self._assignments
            return Started(supervisor, client, infos, assignments, self._hosts)
        except BaseException:
            client.close()
            raise

    def _connect(self, client: Callable[[float], IppClient]) -> IppClient:
        """Connect to the controller.

        A client that waits for the controller's answer looks at no failure. It waits
        for a short time, and twice as long in each further attempt.

        Args:
            client: Makes a client that waits for the given number of seconds.

        Raises:
            StartError: A process has failed, or time is up.
        """
        wait_s = FIRST_CONNECT_S
        while True:
            try:
                return client(wait_s)
            except TimeoutError as error:
                self._check_failures()
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    reason = f"the controller does not answer: {error}"
                    raise StartError(reason) from error
                wait_s = min(2 * wait_s, left_s)

    def _await_engines(self, client: IppClient, timeout_s: float) -> None:
        """Wait until every rank has registered."""
        asked = time.monotonic()

        def all_here() -> bool:
            nonlocal asked
            if time.monotonic() > asked + ASK_S:
                asked = time.monotonic()
                client.ask_for_engines()
            self._ready = len(client.engines())
            return self._ready >= len(self._assignments)

        self._wait(all_here, timeout_s)

    def _greet(self, client: IppClient, timeout_s: float) -> list[RankInfo]:
        greeting = Greeting(client, client.engines().values(), self._changed.set)
        self._wait(greeting.is_answered, timeout_s)
        infos = [reply.result().value for reply in greeting.replies()]
        return sorted(infos, key=lambda info: info.rank)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition holds.

        Raises:
            StartError: A process has failed, or time is up.
        """
        looked = 0.0
        while not condition():
            if time.monotonic() >= looked + self._look_s:
                self._show_progress()
                self._check_failures()
                looked = time.monotonic()
            if time.monotonic() > self._deadline:
                raise StartError(self._late(timeout_s))
            # Files and states of other processes raise no event.
            self._changed.wait(POLL_S)
            self._changed.clear()
        self._show_progress()

    def _show_progress(self) -> None:
        progress = Progress(
            controller=(self._run_dir / "security/ipcontroller-client.json").exists(),
            stages={
                status.rank: stage
                for status in self._statuses
                if (stage := status.stage) is not None
            },
            ready=self._ready,
            assignments=self._assignments,
        )
        if progress != self._shown:
            self._shown = progress
            self._on_progress(progress)

    def _check_failures(self) -> None:
        first = self._process_supervisor.first_exit
        if first is not None and first[0] == "controller":  # ranks fail without it
            raise StartError(self._ended(*first), died=True)
        for status in self._statuses:
            if (failure := status.failure) is not None:
                raise StartError(self._failed(status.rank, failure))
        if (code := self._process_supervisor.own_exit_code) is not None:
            raise StartError(
                f"the process supervisor ended with {describe_exit(code)} while the "
                f"cluster was starting{self._process_supervisor.errors()}",
                died=True,
            )
        if first is not None:
            program, code = first
            if program == "mpiexec" and code >= 0:
                self._await_exit_of_a_rank()  # mpiexec ends when its ranks have ended
            raise StartError(self._ended(program, code), died=True)
        self._check_ranks()

    def _await_exit_of_a_rank(self) -> None:
        """Raise for a rank that has ended. Its parent may report that late."""
        deadline = time.monotonic() + 2 * EXIT_REPORT_TIMEOUT_S
        while time.monotonic() < deadline:
            self._check_ranks()
            time.sleep(POLL_S)

    def _check_ranks(self) -> None:
        for status in self._statuses:
            if (end := status.end()) is not None:
                raise StartError(self._failed(status.rank, end), died=True)

    def _failed(self, rank: int, end: ProcessExit) -> str:
        host = self._assignments[rank].host
        # A rank parent that fails before it has begun the rank writes to mpiexec's log.
        log = "" if end.ending else self._log("mpiexec")
        return (
            f"rank {rank} of {len(self._assignments)} on {host} ended with {end.how} "
            f"while it was starting{end.ending}" + (log and f":\n{log}")
        )

    def _ended(self, program: str, code: int) -> str:
        how, log = describe_exit(code), self._log(program)
        return f"{program} ended with {how} while it was starting:\n{log}"

    def _log(self, program: str) -> str:
        """The end of a program's log; "" if the program has not begun."""
        path = self._process_supervisor.log(program)
        return tail_of(path.read_text(errors="replace")) if path.exists() else ""

    def _late(self, timeout_s: float) -> str:
        late = []
        for assignment, status in zip(self._assignments, self._statuses, strict=True):
            stage = status.stage or "not begun"
            late.append(f"  rank {assignment.rank} on {assignment.host}: {stage}")
            late += [f"    {line}" for line in status.last_lines().splitlines()]
        late += self._log("mpiexec").splitlines()
        return (
            f"{self._ready} of {len(self._assignments)} ranks were up after "
            f"{timeout_s:g} s: raise --timeout, or see what the others wait for:\n"
            + "\n".join(late)
        )
