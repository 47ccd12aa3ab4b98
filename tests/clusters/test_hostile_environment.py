"""In an environment that lacks something, a cluster works or its error names it.

Each case runs hostile_work.py with its own mount points, limits and variables. Mount
points need root.
"""

from __future__ import annotations

import functools
import os
import resource
import shlex
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from nbdist.collectives.sync import semaphore
from nbdist.collectives.sync.shared_segment import Segment
from nbdist.ipc.fork_messages import FORKED
from tests.clusters import fake_clock
from tests.collectives.test_shared_segment import address_of

ROOT = Path(__file__).parents[2]
WORK = [sys.executable, "-m", "tests.clusters.hostile_work"]
WITHIN_S = 150.0
FULL = "dd if=/dev/zero of={0}/filler bs=64k 2> /dev/null || true"
SMALL = "size=1m"
LARGE = "size=192m"
# /dev is shared with the rest of the machine: another one, without /dev/shm.
NO_MEMORY_FOLDER = """
dev=$(mktemp -d) && mount -t tmpfs tmpfs $dev && cd $dev && mkdir pts
for each in null zero full random urandom tty
do touch $each && mount --bind /dev/$each $each; done
ln -s /proc/self/fd fd && ln -s pts/ptmx ptmx && mount --bind /dev/pts pts
mount --rbind $dev /dev && cd / && ! test -e /dev/shm
"""
# /proc/sys/net is that of a network namespace, whose loopback device has to be set up.
NO_IPV6 = """
ip link set lo up &&
for each in all default lo; do echo 1 > /proc/sys/net/ipv6/conf/$each/disable_ipv6; done
"""
OPTIONAL = ("amdsmi", "anywidget", "ipywidgets", "keras", "mcp", "pynvml", "rich")
"""Modules that a cluster works without."""


def full(folder: str) -> tuple[str, ...]:
    """Shell commands that mount a full file system over a folder."""
    return cover(folder, SMALL), FULL.format(folder)


@functools.cache
def why_no_mounts() -> str:
    """Why this process cannot make mount points; "" if it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare"
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip()


def cover(folder: str, option: str) -> str:
    """Shell commands that mount an empty file system over a folder.

    If this repository, the virtual environment or Python lie in the folder, they stay
    visible.
    """
    needed = {
        path.resolve()
        for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix))
        if path.resolve().is_relative_to(folder)
    }
    mount = f"mount -t tmpfs -o {option},mode=1777 tmpfs {folder}"
    if not needed:
        return mount
    commands = ["mount -t tmpfs tmpfs /mnt"]
    for number, path in enumerate(needed):
        place = f"mkdir /mnt/{number} && mount --rbind {{}} /mnt/{number}"
        commands.append(place.format(shlex.quote(str(path))))
    commands.append(mount)
    for number, path in enumerate(needed):
        place = "mkdir -p {0} && mount --rbind /mnt/{1} {0}"
        commands.append(place.format(shlex.quote(str(path)), number))
    return " && ".join([*commands, "umount --lazy /mnt"])


def work(
    *arguments: str,
    mounts: tuple[str, ...] = (),
    namespaces: tuple[str, ...] = ("--mount",),
    environment: Mapping[str, str | None] = {},
    descriptors: int | None = None,
    folder: str | Path = ROOT,
    become: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run hostile_work.py. Returns its output.

    Args:
        mounts: shell commands that run first, as root in these namespaces.
        environment: variables; None removes one.
        descriptors: as for `ulimit -n`.
        folder: its working folder.
        become: a program that runs the rest of its command line as another user.
    """
    command = [*become, *WORK, *arguments]
    if mounts:
        if why := why_no_mounts():
            pytest.skip(f"no mount namespace: {why}")
        script = " && ".join([*mounts, f"cd {shlex.quote(str(folder))}", 'exec "$@"'])
        command = ["unshare", *namespaces, "sh", "-c", script, "sh", *command]

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    variables = {**os.environ, **environment}
    return subprocess.run(
        command,
        cwd=folder,
        env={name: value for name, value in variables.items() if value is not None},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def assert_works(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout.endswith("works\n"), f"{done.stdout}\n{done.stderr[-5000:]}"
    assert done.returncode == 0


def test_tmp_becomes_full() -> None:
    """Output is cut with a note, and a rank that dies then is replaced."""
    assert_works(work("full", mounts=(cover("/tmp", LARGE),)))


def test_tmp_is_full_at_the_start() -> None:
    # Otherwise Python's tempfile uses /var/tmp.
    assert_works(work(mounts=(*full("/tmp"), *full("/var/tmp"))))


def test_shared_memory_is_full() -> None:
    assert_works(work(mounts=full("/dev/shm")))


def test_shared_memory_is_absent() -> None:
    assert_works(work(mounts=(NO_MEMORY_FOLDER.strip(),)))


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
def test_ipv6_is_absent() -> None:
    assert_works(work(mounts=(NO_IPV6.strip(),), namespaces=("--mount", "--net")))


def test_optional_parts_are_absent(tmp_path: Path) -> None:
    """The compiled parts are absent, and packages that a user may lack."""
    no_binaries = shutil.ignore_patterns("*.so")
    shutil.copytree(ROOT / "nbdist", tmp_path / "nbdist", ignore=no_binaries)
    for name in OPTIONAL:
        text = f"raise ModuleNotFoundError('No module named {name}', name={name!r})"
        (tmp_path / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {"PYTHONPATH": path, "NBDIST_PRELOAD": None}
    done = work(environment=environment, folder=tmp_path)
    assert_works(done)
    assert done.stdout.splitlines()[:2] == [FORKED] * 2


def test_tmp_is_noexec() -> None:
    assert_works(work(mounts=(cover("/tmp", "noexec"),)))


@pytest.mark.parametrize("home", [None, "/dev/null/nobody"], ids=["unset", "unusable"])
def test_home_is_unset_or_unusable(home: str | None) -> None:
    assert_works(work(environment={"HOME": home}))


def test_a_user_has_no_name_no_capabilities_and_a_home_that_is_read_only() -> None:
    """A umask that a cell sets then applies to this user too."""
    become = (
        *("setpriv", "--reuid=64777", "--regid=64777", "--clear-groups"),
        *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
    )
    done = work(
        "umask",
        mounts=(cover("/root", LARGE), "mount -t tmpfs -o ro tmpfs /mnt"),
        environment={"HOME": "/mnt", "USER": None, "LOGNAME": None},
        become=become,
    )
    assert_works(done)


def test_warnings_are_errors() -> None:
    assert_works(work(environment={"PYTHONWARNINGS": "error"}))


def test_the_limit_is_256_descriptors() -> None:
    assert_works(work(descriptors=256))


def test_full_disks_are_an_error_before_anything_is_started() -> None:
    folders = ("/tmp", "/var/tmp", "/dev/shm")
    mounts = tuple(command for folder in folders for command in full(folder))
    done = work(mounts=mounts, folder="/tmp")  # else Python takes this folder
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "no room for the cluster's files" in last
    assert "TMPDIR" in last


@pytest.fixture
def clock(tmp_path: Path) -> dict[str, str]:
    """Variables that give processes a wall clock which can be moved."""
    if reason := fake_clock.why_not():
        pytest.skip(reason)
    library = fake_clock.library(tmp_path)
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("d", 0.0))
    return {"LD_PRELOAD": str(library), "FAKE_CLOCK": str(offset)}


def test_a_clock_that_jumps_does_not_change_a_wait(clock: dict[str, str]) -> None:
    """It jumps one hour forward, then three hours back, while a rank waits."""
    assert_works(work("clock", environment=clock))


def test_a_wait_is_not_longer_when_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment = Segment.create(semaphore.SEMAPHORE_BYTES)
    address = address_of(segment)
    semaphore.initialise(address)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)  # it was, a moment ago
    start = time.monotonic()
    assert not semaphore.wait(address, 0.05)
    assert time.monotonic() - start > 0.03
