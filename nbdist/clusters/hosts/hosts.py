"""The hosts of a cluster whose ranks are not all on the notebook's host."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from nbdist.clusters.fork_server_client import hash_seed
from nbdist.clusters.hosts.batch_job import BatchJob
from nbdist.clusters.hosts.folder_sync import FolderSync, Stamp, difference
from nbdist.clusters.hosts.gpu import Gpu
from nbdist.clusters.hosts.host_list import HostSlots, nodes_of
from nbdist.clusters.hosts.machine import Host
from nbdist.clusters.hosts.preflight import (
    CONNECT_TIMEOUT_S,
    Preflight,
    problem_table,
)
from nbdist.clusters.hosts.reach import Address
from nbdist.clusters.hosts.remote_host import RemoteHost
from nbdist.clusters.hosts.remote_python import RemotePython
from nbdist.clusters.hosts.remote_shell import Problem, RemoteShell, Ssh
from nbdist.clusters.placement import assign_devices
from nbdist.clusters.resize import Resize
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.config import ClusterConfig
from nbdist.errors import ClusterError, StartError, UsageError
from nbdist.ipc import private_files
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.ipc.flight_record import FlightRecord, Key, known_calls, read_known
from nbdist.ipc.host_sockets import HOST, LAUNCHER_USER
from nbdist.ipc.resources import host_name

__all__ = ["Hosts"]

AT_ONCE = 32
AGAIN_S = 30.0
"""Seconds until a host that could not take part is tried again."""
BEGIN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
OF_THE_USER = (
    "CUDA_LAUNCH_BLOCKING", "GLOO_", "HF_", "MKL_", "NBDIST_", "NCCL_", "OMP_",
    "PYTHONHASHSEED", "PYTORCH_", "TOKENIZERS_", "TORCH_",
)  # fmt: skip
"""The beginnings of the notebook's environment variables that apply on other hosts."""
T = TypeVar("T")


class Hosts:
    """The hosts in a list, in its order.

    Args:
        slots: The hosts and their slots.
        config: The options of the cluster.
        job: The job whose hosts take the place of the list; None without one.
    """

    def __init__(
        self,
        slots: Sequence[HostSlots],
        config: ClusterConfig,
        job: BatchJob | None = None,
    ) -> None:
        self._config = config
        self.job = job
        """The job that has the hosts; None without one."""
        self._shell: RemoteShell = Ssh(config.ssh, min(10.0, config.timeout_s))
        self._slots: list[HostSlots] = []
        self._here: str | None = None
        """The name of this host in the list; None if it is not in the list."""
        self._name = ""
        """That name, also in a later list, which may spell it otherwise."""
        self.others: dict[str, RemoteHost] = {}
        """The other hosts, by name; also those that have left the list."""
        self._set_slots(slots)
        self._machines: dict[str, Host] = {}
        self._addresses: dict[str, Address] = {}
        self._supervisor: SupervisorClient | None = None
        self._begin: dict[str, Any] = {}
        self._controller: dict[str, Any] = {}
        self._least, self._most = nodes_of(config.nnodes)
        """The fewest and the most hosts with which ranks start; None for all."""
        if config.host_discovery is not None:
            self._least = self._least or 1
        self._left_out: dict[str, tuple[float, str]] = {}
        """When hosts could not take part, on the monotonic clock, and why; "" for those
        that were lost."""
        self._enough: int | None = None
        """The number of slots with which ranks start again; None for all."""
        self._connecting = threading.Lock()
        self._sync = None if config.sync is None else FolderSync(config.sync)
        self._copies: dict[str, _Copy] = {}
        """The copies of that folder, by host."""
        self.notes: list[str] = []
        """What the user should know about the hosts."""

    def _set_slots(self, slots: Sequence[HostSlots]) -> None:
        # Only what a job's system has started is in the job, also on this host.
        in_job = self.job is not None and self.job.holds_processes
        here = None if in_job else next((s for s in slots if s.is_here), None)
        if not in_job:
            self._name = self._name or (host_name() if here is None else here.name)
        self._here = None if here is None else self._name
        self._slots = [
            replace(each, name=self._name) if each is here else each for each in slots
        ]
        self._know(self._slots)

    def _know(self, slots: Sequence[HostSlots]) -> None:
        for each in slots:
            if each.name == self._here:
                continue
            python = RemotePython.of(each.python or self._config.python)
            if each.name not in self.others:
                self.others[each.name] = RemoteHost(each.name, self._shell)
            self.others[each.name].python = python  # of its next connection

    def allocate(self, on_wait: Callable[[str], None]) -> None:
        """Wait until the job runs that has the hosts, if there is one.

        Args:
            on_wait: Called with the state of the job while it waits.

        Raises:
            StartError: The job was refused, or has ended.
        """
        if self.job is not None:
            slots = self.job.allocate(on_wait)
            self._shell, self.others = self.job.shell, {}
            self._set_slots(slots)

    def connect(
        self,
        supervisor: SupervisorClient,
        deadline: float,
        on_progress: Callable[[Mapping[str, str]], None],
    ) -> None:
        """Connect the other hosts, and check all of them.

        Args:
            supervisor: Holds the links.
            deadline: On the monotonic clock.
            on_progress: Called with the state of each other host.

        Raises:
            StartError: A host cannot take part.
        """
        self._supervisor = supervisor
        self._addresses, self._begin, self._controller = {}, {}, {}
        self._copies, self._left_out = {}, {}
        others = self._others_in(self._slots)
        preflight = self._check(self._slots, others, deadline, on_progress)
        self.notes = preflight.notes
        good = [each for each in self._slots if each.name not in preflight.problems]
        are_enough, self._enough = self._are_enough(good), None
        if preflight.problems and not are_enough:
            raise StartError(self._table(preflight.problems))
        for name, problem in preflight.problems.items():
            if name in self.others:
                self.others[name].disconnect()
            self._leave_out(name, problem, self.notes.append)

    def _are_enough(self, good: Sequence[HostSlots]) -> bool:
        """Whether ranks start on some hosts of the list alone."""
        if self._enough is not None:
            return sum(each.slots for each in good) >= self._enough
        return len(good) >= (self._least or len(self._slots))

    def check_again(self, n: int) -> None:
        """Check, while ranks run, that as many can start again.

        The hosts that cannot take part then are left out.

        Args:
            n: The number of ranks.

        Raises:
            UsageError: The hosts that can take part have too few slots.
        """
        if self.job is not None:
            return
        try:
            problems = self._join(self._slots)
        except ClusterError as error:
            raise UsageError(str(error)) from error
        good = [each for each in self._slots if each.name not in problems]
        if problems and sum(each.slots for each in good) < n:
            raise UsageError(
                f"{self._table(problems)}\nThe ranks go on. %dist_scale -n N changes "
                "how many start again, and %dist_scale -H on which hosts"
            )
        self._enough = n

    def _others_in(self, slots: Sequence[HostSlots]) -> list[RemoteHost]:
        """The other hosts in a list."""
        return [self.others[s.name] for s in slots if s.name != self._here]

    def _table(self, problems: Mapping[str, Problem]) -> str:
        return problem_table([each.name for each in self._slots], problems)

    def _leave_out(
        self, name: str, problem: Problem, on_note: Callable[[str], None]
    ) -> None:
        _, before = self._left_out.get(name, (0.0, ""))
        if problem.what != before:
            on_note(f"host {name} takes no part: {problem.what}; {problem.remedy}")
        self._left_out[name] = time.monotonic(), problem.what

    def tries_again(self, slots: Sequence[HostSlots]) -> bool:
        """Whether it is time to try hosts again that were lost or could not take part.

        Args:
            slots: The hosts that should take part.
        """
        now = time.monotonic()
        since = [
            self._left_out.setdefault(each.name, (now, ""))[0]
            for each in slots
            if not self._has(each)
        ]
        return any(now > each + AGAIN_S for each in since)

    def reachable(
        self, slots: Sequence[HostSlots], on_note: Callable[[str], None]
    ) -> list[HostSlots]:
        """Those hosts of another list that can take part. New ones are connected.

        Args:
            slots: The list.
            on_note: Called with why a host cannot take part, once for each time.
        """
        self._know(slots)
        problems = self._join(slots)
        for name in self._left_out.keys() - problems.keys():
            del self._left_out[name]
        for name, problem in problems.items():
            self._leave_out(name, problem, on_note)
        return [each for each in slots if each.name not in problems]

    @property
    def usable(self) -> list[HostSlots]:
        """The hosts in the list that are connected."""
        return [each for each in self._slots if self._has(each)]

    def _join(self, slots: Sequence[HostSlots]) -> dict[str, Problem]:
        """Connect those hosts of a list that are not. Returns why some cannot be.

        Raises:
            ClusterError: A host does not answer, or has no room.
        """
        with self._connecting:
            others = self._others_in(slots)
            new = [host for host in others if not host.is_connected]
            if not new and all(each.name in self._addresses for each in slots):
                return {}
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            preflight = self._check(slots, new, deadline, lambda _: None)
            bad = [host for host in new if host.name in preflight.problems]
            for host in bad:
                host.disconnect()
            good = [host for host in new if host not in bad]
            self._prepare(good, {each.name: each.slots for each in slots})
            return preflight.problems

    def _check(
        self,
        slots: Sequence[HostSlots],
        new: Sequence[RemoteHost],
        deadline: float,
        on_progress: Callable[[Mapping[str, str]], None],
    ) -> Preflight:
        """Connect hosts, and check all that are in a list."""
        assert self._supervisor is not None
        listed = self._others_in(slots)
        for host in new:
            host.connect(self._supervisor, self._config.host_timeout_s)

        def show() -> None:
            states = ("connecting", "connected")
            on_progress({h.name: states[h.is_connected] for h in listed})

        order = [each.name for each in slots]
        here = self._here if self._here in order else None
        preflight = Preflight(
            listed, here, order, self._config.interface, self._addresses
        )
        preflight.run(deadline, show)
        for name in preflight.addresses:
            told = preflight.facts[name]["machine"]
            self._machines[name] = _machine(name, told)
        self._addresses |= preflight.addresses
        if self._sync is not None and self._sync.left_out:
            names = ", ".join(self._sync.left_out[:5])
            preflight.notes.append(
                f"--sync leaves out files above 50 MB, such as {names}"
            )
        return preflight

    def adopt(self, slots: Sequence[HostSlots]) -> list[HostSlots]:
        """Replace the list of hosts. Connected hosts stay connected.

        Returns:
            The list before.
        """
        before = self._slots
        self._set_slots(slots)
        return before

    @property
    def listed(self) -> list[HostSlots]:
        """The list of hosts."""
        return list(self._slots)

    @property
    def _usable(self) -> list[HostSlots]:
        """The hosts of `usable`, as many as may be used."""
        return self.usable[: self._most]

    def resize(self, n: int, assignments: Sequence[DeviceAssignment]) -> Resize:
        """The change of the world to `n` ranks on the hosts of the list.

        Ranks without a slot leave, and the last ones if there are more than `n`.

        Args:
            n: The new number of ranks.
            assignments: Those of the ranks that run.
        """
        left = {each.name: each.slots for each in self._slots}
        staying = []
        for rank, assignment in enumerate(assignments):
            left[assignment.host] = left.get(assignment.host, 0) - 1
            if left[assignment.host] >= 0:
                staying.append(rank)
        kept = set(staying[:n])
        return Resize(n, tuple(r for r in range(len(assignments)) if r not in kept))

    def disconnect_unused(self, assignments: Sequence[DeviceAssignment]) -> None:
        """End the links to hosts that have left the list and have no rank."""
        named = {each.name for each in self._slots}
        used = {each.host for each in assignments}
        for name, host in self.others.items():
            if name not in named | used and host.is_connected:
                host.disconnect()

    def make_room(self, count: int, assignments: Sequence[DeviceAssignment]) -> None:
        """Connect hosts of the list that are not, if there are too few free slots.

        Args:
            count: The number of slots that must be free.
            assignments: Those of the ranks that run.

        Raises:
            UsageError: There are too few. The message has the problem of each host.
        """
        if self._free_slots(assignments) >= count:
            return
        try:
            problems = self._join(self._slots)
        except ClusterError as error:
            raise UsageError(str(error)) from error
        if self._free_slots(assignments) < count and problems:
            raise UsageError(self._table(problems))

    def first_assignments(self, n: int) -> list[DeviceAssignment]:
        """The device assignments of the first ranks.

        Args:
            n: The number of ranks, or fewer if hosts may be left out.

        Raises:
            UsageError: As for `assign`.
        """
        free = self._free_slots(())
        return self.assign(n if self._least is None else min(n, free))

    def assign(
        self, n: int, before: Sequence[DeviceAssignment] = ()
    ) -> list[DeviceAssignment]:
        """The device assignments of ranks.

        The ranks fill the slots of one host after the other.

        Args:
            n: The number of ranks to add.
            before: The assignments of the ranks that run.

        Returns:
            Those of the added ranks.

        Raises:
            UsageError: The hosts have too few free slots, or a host has too few GPUs or
                cores or too little memory.
        """
        added: list[DeviceAssignment] = []
        for each in self._usable:
            machine = self._machines[each.name]
            running = [there for there in before if there.host == each.name]
            count = min(each.slots - len(running), n - len(added))
            if count <= 0:
                continue
            config = replace(self._config, n=len(running) + count)
            found = assign_devices(config, machine, running)
            first = len(before) + len(added)
            place = self._addresses[each.name]
            added += [
                replace(
                    one,
                    rank=first + number,
                    address=place.address,
                    interface=place.interface,
                )
                for number, one in enumerate(found)
            ]
        if len(added) < n:
            named = ", ".join(f"{each.name}:{each.slots}" for each in self._usable)
            raise UsageError(
                f"-n {len(before) + n}: the hosts {named} have {len(added)} free slots"
            )
        return added

    def moved(
        self, died: Iterable[int], assignments: Sequence[DeviceAssignment]
    ) -> dict[int, DeviceAssignment | None]:
        """New device assignments for dead ranks whose host is lost.

        Args:
            died: The dead ranks.
            assignments: Those of all ranks.

        Returns:
            By rank. None if no other host has a free slot.
        """
        homeless = [rank for rank in died if self.why_lost(assignments[rank].host)]
        if not homeless:
            return {}
        kept = [a for rank, a in enumerate(assignments) if rank not in homeless]
        free = min(self._free_slots(kept), len(homeless))
        found: list[DeviceAssignment | None] = []
        with contextlib.suppress(UsageError):  # another host is out of memory
            found += self.assign(free, kept)
        found += [None] * (len(homeless) - len(found))
        return dict(zip(sorted(homeless), found, strict=True))

    def _free_slots(self, assignments: Sequence[DeviceAssignment]) -> int:
        used = [each.host for each in assignments]
        free = (each.slots - used.count(each.name) for each in self._usable)
        return sum(max(0, count) for count in free)

    def _has(self, slots: HostSlots) -> bool:
        """Whether a host was checked, and is connected."""
        other = self.others.get(slots.name)
        return slots.name in self._addresses and (other is None or other.is_connected)

    def begin(
        self,
        assignments: Iterable[DeviceAssignment],
        variables: Mapping[str, str],
        work_dir: str,
    ) -> None:
        """Have the other hosts prepare to start ranks.

        Args:
            assignments: Those of all ranks.
            variables: Environment variables for the ranks.
            work_dir: The working folder of the ranks.

        Raises:
            ClusterError: A host does not answer, or has no room.
        """
        own = {k: v for k, v in os.environ.items() if k.startswith(OF_THE_USER)}
        of_all = {
            **own,
            **variables,
            LAUNCHER_USER: str(os.geteuid()),
            "PYTHONHASHSEED": hash_seed(),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        self._begin = {"variables": of_all, "work_dir": work_dir, "path": [*sys.path]}
        sync = self._sync
        if sync and not any(sync.path_in_copy(p, "") for p in (work_dir, *sys.path)):
            self.notes.append(
                f"--sync {sync.folder}: neither the working folder nor a folder of "
                "sys.path is in it, so that ranks elsewhere do not import from the "
                "copy: name the notebook's folder or one above it"
            )
        counts = {each.name: each.slots for each in self._slots}
        counts |= Counter(each.host for each in assignments)
        self._prepare(self._connected, counts)

    def _prepare(self, hosts: Sequence[RemoteHost], counts: Mapping[str, int]) -> None:
        """Have hosts prepare to start ranks.

        Args:
            hosts: The hosts, which are connected.
            counts: The number of ranks on each.

        Raises:
            ClusterError: A host does not answer, or has no room.
        """

        def prepare(host: RemoteHost) -> None:
            self._open_copy(host)
            path = [self.path_on(host.name, each) for each in self._begin["path"]]
            variables = {
                **self._begin["variables"],
                **self.variables(host.name),
                "NBDIST_WORK_DIR": self.path_on(host.name, self._begin["work_dir"]),
                "NBDIST_PATH": os.pathsep.join(path),
            }
            host.ask(
                "begin",
                n=counts[host.name],
                interface=self._addresses[host.name].interface,
                variables=variables,
                mpiexec=self._config.mpiexec,
                keeps_commits=self._config.on_failure != "stop",
                timeout_s=BEGIN_TIMEOUT_S,
            )
            if self._controller:
                host.ask("connect_controller", connection=self._controller)

        _of_all(hosts, prepare)

    # -- the copied folder -----------------------------------------------------------

    def _open_copy(self, host: RemoteHost) -> None:
        """Find or make the copy on a host, and bring it up to date."""
        if self._sync is not None:
            told = host.ask("open_copy", name=self._sync.name)
            stamps = {name: tuple(stamp) for name, stamp in told["stamps"].items()}
            self._copies[host.name] = _Copy(told["folder"], stamps)
            self._update_copy(host, self._sync.stamps())

    def _update_copy(self, host: RemoteHost, stamps: Mapping[str, Stamp]) -> None:
        """Send a host what has changed."""
        assert self._sync is not None
        copy = self._copies[host.name]
        changed, removed = difference(stamps, copy.stamps)
        if changed or removed:
            packed = self._sync.packed(changed)
            name = self._sync.name
            host.ask("update_copy", body=packed, name=name, removed=removed)
            copy.stamps = dict(stamps)

    def synchronize(self) -> None:
        """Send the other hosts what has changed in the copied folder.

        Raises:
            ClusterError: A host has no room.
            UsageError: The folder has too many files.
        """
        if self._sync is None:
            return
        stamps = self._sync.stamps()

        def update(host: RemoteHost) -> None:
            try:
                self._update_copy(host, stamps)
            except ClusterError:
                if not host.why_lost:
                    raise

        _of_all([h for h in self._connected if h.name in self._copies], update)

    def path_on(self, host: str, path: str) -> str:
        """The path of a file on a host, which may be that in the copied folder."""
        copy = self._copies.get(host)
        if copy is None or self._sync is None or not path:
            return path
        return self._sync.path_in_copy(path, copy.folder) or path

    def script_on(self, host: str, path: str) -> str:
        """The path of a script on a host.

        Raises:
            UsageError: The host does not have it.
        """
        there = self.path_on(host, path)
        other = self.others.get(host)
        if other is not None and not other.ask("exists", path=there):
            raise UsageError(
                f"host {host} has no {there}: start the cluster with --sync and the "
                "script's folder, which is then copied to the hosts"
            )
        return there

    def variables(self, name: str | None = None) -> dict[str, str]:
        """The environment variables that tell rank parents and ranks where they are.

        Args:
            name: The ranks' host. Default: this host, on which there may be none.
        """
        return {HOST: self._name if name is None else name}

    @property
    def interface(self) -> str | None:
        """This host's interface in the network of the ranks; None if it has no rank."""
        return None if self._here is None else self._addresses[self._here].interface

    def is_here(self, assignment: DeviceAssignment) -> bool:
        """Whether a rank is on this host."""
        return assignment.host == self._here

    def connect_controller(self, connection: dict[str, Any]) -> None:
        """Let the ranks of the other hosts reach the controller.

        Args:
            connection: The content of its file for engines.

        Raises:
            ClusterError: A host does not answer.
        """
        self._controller = connection
        _of_all(
            self._connected,
            lambda host: host.ask("connect_controller", connection=connection),
        )

    def flight_records(self, folder: Path) -> list[FlightRecord]:
        """The flight records of all hosts, as `flight_record.read_folder` reads them.

        The times are those of this host's monotonic clock, as exact as the hosts'
        clocks agree.

        Args:
            folder: The folder of this host's records.
        """
        known = known_calls(folder)
        for keys in self._records(None):
            known |= keys
        found = read_known(folder, known)
        offset_ns = time.time_ns() - time.monotonic_ns()
        for records in self._records(known):
            found += [record.shifted(offset_ns) for record in records]
        return found

    def _records(self, known: set[Key] | None) -> list[Any]:
        """The other hosts' records of known calls; for None, the calls' keys."""
        wanted = pickle.dumps(known)

        def ask(host: RemoteHost) -> Any:
            answer = io.BytesIO()
            try:
                host.ask("flight_records", body=wanted, into=answer)
            except ClusterError:  # it was lost
                return ()
            return pickle.loads(answer.getbuffer())

        return _of_all(self._connected, ask)

    def remove_flight_records(self, kept: Iterable[str]) -> None:
        """Remove the records of all processes but these."""
        names = list(kept)

        def ask(host: RemoteHost) -> None:
            with contextlib.suppress(ClusterError):  # it was lost
                host.ask("remove_flight_records", kept=names)

        _of_all(self._connected, ask)

    def await_signal(self, seconds: float) -> str | None:
        """Wait for a signal of the batch system to the processes of the job.

        Returns:
            Its name; None if none has come within `seconds`, or a host was lost.
        """
        host = next(iter(self._connected), None)
        if host is None:
            time.sleep(seconds)
            return None
        limit_s = seconds + END_TIMEOUT_S
        with contextlib.suppress(
            ClusterError
        ):  # it was lost: perhaps the job has ended
            name: str | None = host.ask(
                "await_signal", seconds=seconds, timeout_s=limit_s
            )
            return name
        return None

    def leave_job(self) -> None:
        """End the links to the hosts of a job that has ended.

        A batch system does not end processes that ssh has started, and those that it
        does end have some time until then.
        """
        assert self.job is not None
        for host in self._connected:
            host.disconnect(f"{self.job.system} ends job {self.job.id}")

    def take_commits(self, folder: Path) -> list[Path]:
        """Copy the last commits of an elastic run that other hosts have.

        Args:
            folder: Where they are copied to, each to a folder of its own.

        Returns:
            These folders.
        """

        def take(host: RemoteHost) -> Path | None:
            with contextlib.suppress(ClusterError, OSError):  # it was lost, or no room
                paths = host.ask("take_commit")
                place = Path(tempfile.mkdtemp(prefix="commit-", dir=folder))
                for path in paths:
                    with private_files.create_file(place / Path(path).name) as file:
                        host.ask("fetch", into=file, path=path)
                return place if paths else None
            return None

        return [place for place in _of_all(self._connected, take) if place is not None]

    def end(self) -> None:
        """End all processes on the other hosts, and wait for that."""
        # Without threads, which cannot be started when the interpreter ends.
        requests = []
        for host in self._connected:
            # Where it cannot be reached, it ends by itself.
            with contextlib.suppress(ClusterError):
                requests.append(host.send("end", timeout_s=END_TIMEOUT_S))
        for answer in requests:
            with contextlib.suppress(ClusterError):
                answer()
        if self.job is not None:
            self.job.cancel()

    @property
    def _connected(self) -> list[RemoteHost]:
        return [host for host in self.others.values() if host.is_connected]

    def why_lost(self, name: str) -> str:
        """Why a host was lost; "" if it was not."""
        host = self.others.get(name)
        return "" if host is None else host.why_lost


@dataclass
class _Copy:
    """The copy of the synchronized folder on a host."""

    folder: str
    stamps: dict[str, Stamp]
    """What it has."""


def _of_all(hosts: Sequence[RemoteHost], ask: Callable[[RemoteHost], T]) -> list[T]:
    """Call a function for hosts at once."""
    if not hosts:
        return []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, hosts))


def _machine(name: str, told: dict[str, Any]) -> Host:
    """A host's resources, of what it has told."""
    gpus = tuple(Gpu(**gpu) for gpu in told["gpus"])
    return Host(**{**told, "name": name, "gpus": gpus})
