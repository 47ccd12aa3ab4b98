"""A job of a batch system, whose hosts the ranks of a cluster run on.

The job is submitted by ipyparallel's launcher. Its script waits, and nbdist reaches the
hosts that the job has got as it reaches other hosts. Inside a job, no job is submitted.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import shutil
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from nbdist.clusters.hosts.host_list import HostSlots
from nbdist.clusters.hosts.remote_shell import RemoteShell, Ssh
from nbdist.config import ClusterConfig
from nbdist.errors import StartError, UsageError
from nbdist.ipc.locks import Event

__all__ = ["BatchJob", "JobState", "output_of", "seconds_of"]

COMMAND_TIMEOUT_S = 20.0
POLL_S = 1.0
"""Seconds between two looks at the queue."""
TELLS_WITHIN_S = 2.0
"""Seconds in which a system that signals a job may tell when it ends."""
END_WITHIN_S = 60.0
"""Seconds in which a system ends the processes of a job."""
WATCH_S = 5.0
"""Seconds between two looks at a job that runs."""
NOTICES_S = (120, 30)
"""Seconds before its end at which a job's end is announced, if no signal does."""
WAITING = """idle=0
while [ $idle -lt 4 ]; do
  sleep 30
  idle=$((idle + 1))
  if ps -u "$(id -u)" -o args= | grep -q '^nbdist agent'; then idle=0; fi
done"""
"""What the job runs on its first host. It ends when the host has not been in use for
two minutes, as when the notebook's host has lost power."""


class JobState(NamedTuple):
    """What a batch system says about a job."""

    phase: Literal["waits", "runs", "ends", "ended"]
    """A job that "ends" still has processes."""
    text: str
    """The state in the system's own words."""
    seconds_left: int | None = None
    """Seconds until its time limit; None if they are not known."""


class BatchJob(ABC):
    """A job that is submitted, or in whose allocation this process runs.

    Args:
        config: The options of the cluster; `n` is the number of ranks.

    Raises:
        UsageError: There is no such batch system here.
    """

    system: ClassVar[str]
    """The name of the batch system."""
    command: ClassVar[str]
    """The command that submits a job."""
    holds_processes: ClassVar[bool] = False
    """Whether the system ends all processes that `shell` has started, some seconds
    after it has ended the job."""

    def __init__(self, config: ClusterConfig) -> None:
        if shutil.which(self.command) is None:
            raise UsageError(
                f"--launcher {config.launcher}: there is no {self.command} here; start "
                "the notebook on a host that submits jobs, or name hosts with -H"
            )
        self._config = config
        self._is_own = self.current() is None
        self.id = self.current() or ""
        """The number of the job; "" before it is submitted, and after `cancel`."""
        self._watcher: _Watcher | None = None

    # -- what differs between batch systems ----------------------------------------

    @staticmethod
    @abstractmethod
    def current() -> str | None:
        """The job in whose allocation this process runs; None outside of one."""

    @abstractmethod
    def submit(self) -> str:
        """Submit the job. Returns its number.

        Raises:
            StartError: The job is refused.
        """

    @abstractmethod
    def look(self) -> JobState:
        """The state of the job now.

        Raises:
            StartError: The system does not answer.
        """

    @abstractmethod
    def cores(self) -> dict[str, int]:
        """The hosts of the job, which runs, and the most ranks on each."""

    @abstractmethod
    def delete(self) -> None:
        """Cancel the job.

        Raises:
            StartError: The system refuses, because the job has ended.
        """

    def place(self, state: JobState) -> str:
        """Where the job is in the queue, as the notebook shows it while it waits."""
        return f"job {self.id} waits in the queue of {self.system}: {state.text}"

    @property
    def shell(self) -> RemoteShell:
        """Reaches the hosts of the job."""
        return Ssh(self._config.ssh, min(10.0, self._config.timeout_s))

    # -- what does not ---------------------------------------------------------------

    def allocate(self, on_wait: Callable[[str], None]) -> list[HostSlots]:
        """Submit the job, and wait until it runs. An interrupt cancels it.

        Args:
            on_wait: Called with the state of the job while it waits.

        Returns:
            The hosts, and the number of ranks on each.

        Raises:
            StartError: The system refuses the job, or the job ended before it ran.
        """
        if self._is_own:
            self.id = self.submit()
        try:
            while (state := self.look()).phase != "runs":
                if state.phase != "waits":
                    raise StartError(
                        f"{self.system}'s job {self.id} ended before it ran: "
                        f"{state.text or 'it is no longer in the queue'}"
                    )
                on_wait(self.place(state))
                time.sleep(POLL_S)  # batch systems have no event for it
            return self._slots()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the job, if it was submitted here. A second call does nothing."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        if self._is_own and self.id:
            with contextlib.suppress(StartError):  # it has ended
                self.delete()
            self.id = ""

    def watch(
        self,
        await_signal: Callable[[float], str | None],
        on_note: Callable[[str], None],
        on_ending: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Say when the job is about to end, and when it has ended.

        The functions are called from one thread.

        Args:
            await_signal: Waits for so many seconds for a signal of the system to the
                job's processes. Returns its name, or None.
            on_note: Called with what to tell the user.
            on_ending: Called when the job is about to end: at a signal, and at each of
                `NOTICES_S`.
            on_end: Called when the job ends.
        """
        self._watcher = _Watcher(self, await_signal, on_note, on_ending, on_end)

    def _slots(self) -> list[HostSlots]:
        """The hosts of the job, and the number of ranks on each."""
        cores = self.cores()
        if not cores:
            raise StartError(f"{self.system} names no hosts of its job {self.id}")
        n = self._config.n or len(cores)
        # A whole node may have more cores than its share of the ranks.
        share = -(-n // len(cores))
        slots = {name: min(count, share) for name, count in cores.items()}
        for name, count in cores.items():
            slots[name] += max(0, min(n - sum(slots.values()), count - slots[name]))
        return [HostSlots(name, count) for name, count in slots.items()]

    def submit_script(self, kind: type[Any], script: str, **traits: Any) -> str:
        """Submit a script by a launcher of ipyparallel. Returns the job's number.

        Args:
            kind: A subclass of ipyparallel's `BatchSystemLauncher`.
            script: The script, without the lines that the launcher adds.
            traits: Further traits of the launcher.

        Raises:
            StartError: The job is refused; the message has the system's words.
        """
        # Slow to import, and not needed without a batch system.
        from ipyparallel.cluster.launcher import LauncherError

        class Launcher(kind):  # type: ignore[misc]
            job_array_regexp = re.compile("")  # one job, and no array of jobs

            def _run_command(self, command: list[str], **options: Any) -> Any:
                # The reason of a refusal.
                return super()._run_command(command, stderr=subprocess.PIPE, **options)

        with tempfile.TemporaryDirectory(prefix="nbdist-job-") as folder:
            launcher = Launcher(
                work_dir=folder,
                profile_dir=folder,
                output_file="/dev/null",
                log=logging.getLogger("nbdist"),
                queue=self._config.partition or "",
                **traits,
            )
            launcher.default_template = script
            try:
                with _errors_of(self.command):
                    return str(launcher.start(self._config.n))
            except LauncherError as error:
                raise StartError(f"{self.command}: {error}") from error


class _Watcher:
    """Looks at a job that runs, on a thread; see `BatchJob.watch`."""

    def __init__(
        self,
        job: BatchJob,
        await_signal: Callable[[float], str | None],
        on_note: Callable[[str], None],
        on_ending: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._job = copy.copy(job)  # it keeps the number of the job
        self._await_signal = await_signal
        self._on_note, self._on_ending, self._on_end = on_note, on_ending, on_end
        self._announced = 0
        self._ended = Event()
        thread = threading.Thread(target=self._run, name="nbdist-job", daemon=True)
        thread.start()

    def close(self) -> None:
        """Look no more. A second close does nothing."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            signal = self._await_signal(WATCH_S)
            if self._ended.is_set():
                return
            if signal is not None:
                self._on_ending()  # first: there may be little time
            try:
                state = self._job.look() if signal is None else self._look_for_end()
            except StartError:  # the system restarts, or is too busy to answer
                continue
            if self._ended.is_set():
                return
            if state.phase != "runs":
                self._follow_end(state)
                return
            self._announce(signal, state.seconds_left)

    def _look_for_end(self) -> JobState:
        """Look at the job after a signal, until the system tells when the job ends.

        It may tell that a moment after the signal, or never.
        """
        until = time.monotonic() + TELLS_WITHIN_S
        while True:
            state = self._job.look()
            left_s = until - time.monotonic()
            is_told = state.phase != "runs" or state.seconds_left is not None
            if is_told or left_s <= 0 or self._ended.wait(min(POLL_S, left_s)):
                return state

    def _follow_end(self, state: JobState) -> None:
        """Have the ranks saved and ended, and tell the user how the job has ended."""
        self._on_ending()
        self._on_end()
        until = time.monotonic() + END_WITHIN_S
        while state.phase == "ends" and time.monotonic() < until:
            time.sleep(POLL_S)  # batch systems have no event for it
            with contextlib.suppress(StartError):  # it is too busy to answer
                state = self._job.look()
        why = state.text or "it is no longer in the queue"
        self._on_note(f"{self._job.system} ends job {self._job.id}: {why}")

    def _announce(self, signal: str | None, left: int | None) -> None:
        """Tell the user that the job ends soon, unless it was told."""
        due = 0 if left is None else sum(left <= notice for notice in NOTICES_S)
        before, self._announced = self._announced, max(due, self._announced)
        if due > before:
            self._on_ending()
        system, job = self._job.system, self._job.id
        if signal is not None:
            when = "" if left is None else f", which ends in {_duration(left)}"
            what = f"{system} has sent {signal} to job {job}{when}"
        elif left is not None and due > before == 0:
            what = f"{system} ends job {job} in {_duration(left)}"
        else:
            return
        self._on_note(
            f"{what}: pull or save what you need; an elastic run writes its next "
            "commit to a file"
        )


def _duration(seconds: int) -> str:
    return f"{seconds} s" if seconds < 600 else f"{seconds // 60} min"


def output_of(*argv: str, codes: Mapping[int, str] | None = None) -> str:
    """The output of a command of a batch system.

    Args:
        argv: The command line.
        codes: What to return instead, by exit code.

    Raises:
        StartError: It fails with another exit code.
    """
    with _errors_of(argv[0]):
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        if codes and done.returncode in codes:
            return codes[done.returncode]
        done.check_returncode()
        return done.stdout


def seconds_of(text: str) -> int | None:
    """Seconds of times such as "1-02:03:04" or "4:30"; None for another text."""
    days, dash, clock = text.strip().rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or len(parts) > 3:
        return None
    if dash and not days.isdecimal():
        return None
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return seconds + int(days or 0) * 86400


@contextlib.contextmanager
def _errors_of(command: str) -> Iterator[None]:
    """Raise a StartError, with what the system said, where a command fails."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        said = error.stderr or error.stdout or f"exit code {error.returncode}"
        said = said if isinstance(said, str) else said.decode(errors="replace")
        raise StartError(f"{command}: {said.strip()}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(f"{command}: {error}") from error
