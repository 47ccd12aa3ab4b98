"""Independent processes beside the notebook, each with its own output and exit code.

The functions follow the workers API of Cloudera's machine-learning notebooks: launch,
list, await, stop. Workers are not ranks of a cluster. A process supervisor ends them
when the notebook ends.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from nbdist.clusters.hosts.gpu import visibility
from nbdist.clusters.hosts.machine import this_host
from nbdist.clusters.options import checked_script
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.errors import UsageError
from nbdist.ipc import folders
from nbdist.ipc.ports import free_ports
from nbdist.ipc.process_files import describe_exit
from nbdist.ipc.roles import environment, role_of, tf_config

__all__ = [
    "Report",
    "Worker",
    "WorkerCluster",
    "WorkersResult",
    "await_workers",
    "launch_workers",
    "list_workers",
    "run_cluster",
    "stop_workers",
]  # fmt: skip

LAST_LINES = 12
ADDRESS = "127.0.0.1"
"""The address of all workers, which run on this host."""


class Fields:
    """Gives attributes by name too, as in Cloudera's dicts: `worker["id"]`.

    `dict(worker)` has all fields.
    """

    FIELDS: ClassVar[tuple[str, ...]]

    def __getitem__(self, name: str) -> Any:
        if name not in self.FIELDS:
            raise KeyError(f"{name!r}: expected one of {', '.join(self.FIELDS)}")
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.FIELDS)

    def keys(self) -> tuple[str, ...]:
        """The names of the fields."""
        return self.FIELDS


@dataclass(frozen=True)
class Report(Fields):
    """The state of a worker at one moment."""

    FIELDS = (
        *("id", "rank", "role", "status", "exit_code", "reason", "last_lines"),
        "ip_address",
    )

    id: int
    rank: int
    role: str
    status: str
    """As `Worker.status`."""
    exit_code: int | None
    """The exit code, -N for signal N; None if the worker has not ended, or was lost."""
    reason: str
    """The failure, such as "exit code 3" or "SIGKILL"; "" if there was none."""
    last_lines: tuple[str, ...]
    """The last lines that it has printed."""
    ip_address: str = ADDRESS
    """The address at which the other workers and this process reach it."""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        head = f"worker {self.id}: {self.status}{reason}"
        lines = self.last_lines if self.status in ("failed", "lost") else ()
        return "\n".join([head, *(f"    {line}" for line in lines)])


class Worker(Fields):
    """A process that `nbdist.launch_workers` has started."""

    FIELDS = (
        *("id", "rank", "role", "pid", "status", "exit_code", "output"),
        "ip_address",
    )

    def __init__(
        self, number: int, rank: int, role: str, process_supervisor: SupervisorClient
    ) -> None:
        self.id = number
        """Its number among all workers that this notebook has launched."""
        self.rank = rank
        """Its number among the workers of the same launch."""
        self.role = role
        """"worker" or "ps"."""
        self.ip_address = ADDRESS
        """The address at which the other workers and this process reach it."""
        self.name = f"worker{number}"
        self.process_supervisor = process_supervisor
        self.stopped = False
        """Whether `stop_workers` has ended it."""
        self.reported = False
        """Whether `await_workers` has reported its end."""
        self._read = 0

    @property
    def pid(self) -> int | None:
        """The process id; None until the process has started."""
        return self.process_supervisor.pid(self.name)

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self.process_supervisor.exit_code(self.name)

    @property
    def ended(self) -> bool:
        return self.exit_code is not None or not self.process_supervisor.alive

    @property
    def status(self) -> str:
        """ "starting", "running", "succeeded", "failed", "stopped" or "lost".

        A worker is lost if the process supervisor was killed, which ends all workers.
        """
        code = self.exit_code
        if code is None:
            if not self.process_supervisor.alive:
                return "lost"
            return "starting" if self.pid is None else "running"
        if code == 0:
            return "succeeded"
        return "stopped" if self.stopped else "failed"

    @property
    def output(self) -> str:
        """Everything that it has printed so far, on standard output and error."""
        return self._printed(0).decode("utf-8", "replace")

    def new_lines(self) -> list[str]:
        """The lines that it has printed since the last call.

        An unfinished line is returned when it is finished or the worker has ended.
        """
        ended = self.ended  # first: an ended worker prints no more
        data = self._printed(self._read)
        if not ended:
            data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        return data.decode("utf-8", "replace").splitlines()

    def _printed(self, start: int) -> bytes:
        """The bytes that it has printed, from `start`.

        There are none before the worker starts, nor after the process supervisor was
        killed: the file is removed with the supervisor's folder, at any moment.
        """
        try:
            with self.process_supervisor.log(self.name).open("rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return b""

    def report(self) -> Report:
        """Its state now."""
        status, code = self.status, self.exit_code
        reason = "" if code in (None, 0) else describe_exit(code)
        if status == "lost":
            reason = "the process supervisor was killed"
        lines = tuple(self.output.splitlines()[-LAST_LINES:])
        return Report(self.id, self.rank, self.role, status, code, reason, lines)

    def __repr__(self) -> str:
        return f"<{self.role} {self.id}, rank {self.rank}: {self.status}>"


SHOW_PERIOD_S = 0.1
"""Seconds between two reads of the workers' output."""


@dataclass(frozen=True)
class WorkersResult(Fields):
    """The state of each worker after `await_workers` has waited for it."""

    FIELDS = ("workers", "succeeded", "failures", "unfinished", "ok")

    workers: list[Report]

    @property
    def ok(self) -> bool:
        """Whether no worker has failed, was stopped, or was lost."""
        return not self.failures

    @property
    def succeeded(self) -> list[Report]:
        return [report for report in self.workers if report.status == "succeeded"]

    @property
    def failures(self) -> list[Report]:
        """Workers that failed, were stopped or were lost; see their `reason`."""
        ways = ("failed", "stopped", "lost")
        return [report for report in self.workers if report.status in ways]

    @property
    def unfinished(self) -> list[Report]:
        """Workers that have not ended."""
        ways = ("starting", "running")
        return [report for report in self.workers if report.status in ways]

    def __str__(self) -> str:
        return "\n".join(str(report) for report in self.workers) or "no workers"

    __repr__ = __str__


class WorkerCluster(tuple[dict[str, list[str]], str]):
    """The processes of one program: `cluster_spec, session_addr = run_cluster(...)`.

    It is the pair that Cloudera's `run_cluster` returns, and has the handles too.
    """

    members: list[Worker]
    """The processes, in the order of their ranks."""

    def __new__(
        cls, members: Sequence[Worker], addresses: Sequence[str]
    ) -> WorkerCluster:
        spec: dict[str, list[str]] = {}
        for member, address in zip(members, addresses, strict=True):
            spec.setdefault(member.role, []).append(address)
        made = super().__new__(cls, (spec, f"grpc://{addresses[0]}"))
        made.members = list(members)
        return made

    @property
    def cluster_spec(self) -> dict[str, list[str]]:
        """The addresses "host:port" of the processes of each role, as in `TF_CONFIG`.

        The ports were free when they were chosen. A process listens there only if its
        script does.
        """
        return self[0]

    @property
    def session_addr(self) -> str:
        """The address of worker 0, such as "grpc://127.0.0.1:40123"."""
        return self[1]

    @property
    def workers(self) -> list[Worker]:
        """The workers, without the parameter servers."""
        return [member for member in self.members if member.role == "worker"]

    @property
    def servers(self) -> list[Worker]:
        """The parameter servers."""
        return [member for member in self.members if member.role == "ps"]


Chosen = Worker | int | WorkerCluster | Iterable[Worker | int]
"""Workers, by their handles or ids."""

STOP_TIMEOUT_S = 10.0

_supervisor: SupervisorClient | None = None
_workers: list[Worker] = []
_numbers = itertools.count()


def launch_workers(
    n: int,
    script: str | os.PathLike[str] | None = None,
    args: Sequence[object] = (),
    env: Mapping[str, object] | None = None,
    *,
    code: str | None = None,
    cpu: float | None = None,
    memory: float | None = None,
    nvidia_gpu: int | None = None,
) -> list[Worker]:
    """Start `n` processes beside the notebook, and return at once.

    The environment of each has torchrun's variables, so that the workers can call
    `dist.init_process_group("gloo")` or "nccl", and `NBDIST_WORKER`, its number.

    Args:
        n: number of workers.
        script: a Python file. Its working folder is the notebook's.
        args: the script's arguments.
        env: additional environment variables of each worker.
        code: Python code to run instead of a script.
        cpu: number of threads that the libraries of each worker use.
        memory: GiB that each worker may allocate. Beyond that it gets a `MemoryError`.
        nvidia_gpu: number of GPUs that only this worker sees. Default: each worker sees
            all GPUs.

    Returns:
        The workers, in the order of their ranks.

    Raises:
        UsageError: an argument is invalid or cannot be met; nothing was started.
    """
    launched, _ = _launch(n, 0, script, args, env, code, cpu, memory, nvidia_gpu)
    return launched


def run_cluster(
    n_workers: int,
    n_ps: int = 0,
    worker_script: str | os.PathLike[str] | None = None,
    args: Sequence[object] = (),
    env: Mapping[str, object] | None = None,
    *,
    code: str | None = None,
    cpu: float | None = None,
    memory: float | None = None,
    nvidia_gpu: int | None = None,
) -> WorkerCluster:
    """Start the workers and parameter servers of one program, and return at once.

    All processes run the same script. The environment of each has its role: in
    torchrun's `ROLE_NAME` ("worker" or "ps"), `ROLE_RANK` and `ROLE_WORLD_SIZE`, and in
    TensorFlow's `TF_CONFIG`, which has an address for each process.

    Args:
        n_workers: number of workers, which are ranks 0 to n_workers-1.
        n_ps: number of parameter servers, which are the ranks after them.
        worker_script: a Python file that all processes run, with or without ".py".
        args, env, code, cpu, memory, nvidia_gpu: as for `launch_workers`.

    Returns:
        `(cluster_spec, session_addr)`: the addresses of each role, and that of worker
        0. `.members` has the handles of all processes, in the order of their ranks.

    Raises:
        UsageError: an argument is invalid or cannot be met; nothing was started.
    """
    n = _count("n_workers", n_workers) + _count("n_ps", n_ps, 0)
    script = worker_script
    if script is not None and not Path(script).exists():
        with_suffix = Path(f"{os.fspath(script)}.py")
        script = with_suffix if with_suffix.exists() else script
    members, addresses = _launch(
        n, n_ps, script, args, env, code, cpu, memory, nvidia_gpu
    )
    return WorkerCluster(members, addresses)


def list_workers() -> list[Worker]:
    """Every worker that this notebook has launched, also those that have ended."""
    return list(_workers)


def await_workers(
    workers: Chosen | None = None,
    wait_for_completion: bool = True,
    timeout_seconds: float | None = 60,
    *,
    show: bool = True,
) -> WorkersResult:
    """Wait for workers, and return the state of each.

    An interrupt ends the wait. The workers continue to run.

    Args:
        workers: workers or their ids. Default: all workers whose end was not reported
            yet.
        wait_for_completion: wait until each worker has ended. If False, wait until each
            has started.
        timeout_seconds: the longest wait; None for no limit.
        show: print each line of their output, after the name of its worker.

    Returns:
        The state of each worker.

    Raises:
        UsageError: a worker does not exist, or the time-out is negative.
    """
    if timeout_seconds is not None and not timeout_seconds >= 0:
        raise UsageError(f"timeout_seconds={timeout_seconds!r}: expected 0 or more")
    chosen = (
        [w for w in _workers if not w.reported] if workers is None else _find(workers)
    )
    watch(chosen, wait_for_completion, timeout_seconds, show=show)
    for worker in chosen:
        worker.reported = worker.ended
    return WorkersResult([worker.report() for worker in chosen])


def stop_workers(*workers: Chosen) -> None:
    """End workers and their child processes, and wait until they have ended.

    Args:
        workers: workers or their ids. Default: all workers. Those that have ended are
            skipped.

    Raises:
        UsageError: a worker does not exist.
    """
    chosen = _find(list(workers)) if workers else _workers
    living = [worker for worker in chosen if not worker.ended]
    for worker in living:
        worker.stopped = True
    if living:  # all living workers share one process supervisor
        living[0].process_supervisor.stop([worker.name for worker in living])
        watch(living, True, STOP_TIMEOUT_S, show=False)


def _launch(
    n: int,
    n_ps: int,
    script: str | os.PathLike[str] | None,
    args: Sequence[object],
    env: Mapping[str, object] | None,
    code: str | None,
    cpu: float | None,
    memory: float | None,
    nvidia_gpu: int | None,
) -> tuple[list[Worker], list[str]]:
    """Start the processes. Returns them, and an address with a free port for each."""
    argv = _command(_count("n", n), n_ps, script, args, code)
    gpus = _gpus(n, nvidia_gpu)
    options = {"cwd": folders.current(), "memory": _bytes(memory)}
    port, *ports = free_ports(n + 1)
    addresses = [f"{ADDRESS}:{each}" for each in ports]
    process_supervisor = _running_supervisor()
    launched = []
    for rank in range(n):
        number = next(_numbers)
        variables = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            **_ranks(rank, n, port),
            **environment(rank, n, n_ps),
            "TF_CONFIG": tf_config(rank, addresses, n_ps),
            **_threads(cpu),
            **gpus[rank],
            "NBDIST_WORKER": str(number),
            "PYTHONUNBUFFERED": "1",
            **{name: str(value) for name, value in (env or {}).items()},
        }
        role = role_of(rank, n, n_ps).name
        worker = Worker(number, rank, role, process_supervisor)
        process_supervisor.start(worker.name, argv, variables, **options)
        launched.append(worker)
    _workers.extend(launched)
    return launched, addresses


def _command(
    n: int,
    n_ps: int,
    script: str | os.PathLike[str] | None,
    args: Sequence[object],
    code: str | None,
) -> list[str]:
    # Cloudera's calls pass "" for what they leave out.
    script, code = script or None, code or None
    if (script is None) == (code is None):
        raise UsageError(
            "pass either a script or code: script='worker.py', or code='...'"
        )
    what = ["-c", code] if code is not None else []
    if script is not None:
        what = [str(checked_script(script, n_ps, n))]
    return [sys.executable, *what, *(str(each) for each in args)]


def _ranks(rank: int, n: int, port: int) -> dict[str, str]:
    """torchrun's variables of a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
    }


def _threads(cpu: float | None) -> dict[str, str]:
    if cpu is None:
        return {}
    if not cpu > 0:
        raise UsageError(f"cpu={cpu!r}: expected a number of cores above 0")
    threads = str(max(1, int(cpu)))
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def _bytes(memory: float | None) -> int | None:
    if memory is not None and not memory > 0:
        raise UsageError(f"memory={memory!r}: expected GiB above 0")
    return None if memory is None else int(memory * 2**30)


def _gpus(n: int, each: int | None) -> list[dict[str, str]]:
    """For each worker, the environment variable that selects its GPUs."""
    if each is None:
        return [{}] * n
    host = this_host()
    if _count("nvidia_gpu", each, 0) * n > len(host.gpus):
        raise UsageError(
            f"nvidia_gpu={each} for {n} workers needs {each * n} GPUs, and there are "
            f"{len(host.gpus)}" + (f" ({host.why_no_gpu})" if not host.gpus else "")
        )
    shares = [host.gpus[i * each : (i + 1) * each] for i in range(n)]
    return [visibility(share, of=host.gpus) for share in shares]


def _count(name: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}: expected a whole number, {least} or more")
    return value


def _find(workers: Chosen | list[Chosen]) -> list[Worker]:
    """The workers with these handles or ids."""
    if isinstance(workers, Worker):
        return [workers]
    if isinstance(workers, WorkerCluster):
        return workers.members
    if not isinstance(workers, int):
        return [found for each in workers for found in _find(each)]
    for worker in _workers:
        if worker.id == workers:
            return [worker]
    known = ", ".join(str(worker.id) for worker in _workers) or "none"
    raise UsageError(f"no worker {workers!r}: there are {known}; see list_workers()")


def _running_supervisor() -> SupervisorClient:
    """The process supervisor of this notebook's workers, started if none runs."""
    global _supervisor
    if _supervisor is None or not _supervisor.alive:
        _supervisor = SupervisorClient(
            Path(tempfile.mkdtemp(prefix="nbdist-workers-")), together=False
        )
        atexit.register(_supervisor.close)
    return _supervisor


def watch(
    workers: Sequence[Worker],
    to_the_end: bool,
    timeout_s: float | None,
    *,
    show: bool,
) -> bool:
    """Wait until every worker has ended, or started; False if time was up first.

    Args:
        workers: The workers.
        to_the_end: Wait until they have ended, not until they have started.
        timeout_s: The longest wait; None for no limit.
        show: Print their lines as they appear.
    """

    def done() -> bool:
        return all(
            worker.ended or (not to_the_end and worker.pid is not None)
            for worker in workers
        )

    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = max(0.0, deadline - time.monotonic())
        come = _wait(workers, done, min(left, SHOW_PERIOD_S) if show else left)
        if show:
            _show(workers)
        if come or left == 0:
            return come


def _wait(workers: Sequence[Worker], done: Callable[[], bool], left_s: float) -> bool:
    """Wait until a condition holds; False if time was up first."""
    for worker in workers:
        if not worker.ended:  # all living workers share one process supervisor
            return worker.process_supervisor.wait(
                done, None if math.isinf(left_s) else left_s
            )
    return done()


def _show(workers: Sequence[Worker]) -> None:
    for worker in workers:
        for line in worker.new_lines():
            print(f"[{worker.role} {worker.id}] {line}", flush=True)
