"""In an environment that lacks something, a cluster works or says what is missing.

Each case is a program of its own (hostile_work.py) with its own mount points, limits
and variables. Mount points need root.
"""

from __future__ import annotations

import functools
import os
import resource
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
from tests.collectives.test_shared_segment import address_of

ROOT = Path(__file__).parents[2]
WORK = [sys.executable, "-m", "tests.cluster.hostile_work"]
WITHIN_S = 150.0
FULL = "dd if=/dev/zero of={0}/filler bs=64k 2> /dev/null || true"
SMALL = "mount -t tmpfs -o size=1m,mode=1777 tmpfs {0}"
LARGE = "mount -t tmpfs -o size=192m,mode=1777 tmpfs {0}"
# /dev is shared with the rest of the machine: another one, without /dev/shm.
NO_MEMORY_FOLDER = """
dev=$(mktemp -d) && mount -t tmpfs tmpfs $dev && cd $dev && mkdir pts
for each in null zero full random urandom tty
do touch $each && mount --bind /dev/$each $each; done
ln -s /proc/self/fd fd && ln -s pts/ptmx ptmx && mount --bind /dev/pts pts
mount --rbind $dev /dev && cd / && ! test -e /dev/shm
"""


@functools.cache
def why_no_mounts() -> str:
    """Why this process cannot have mount points of its own; "" if it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "needs root and unshare"
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip()


def work(
    *arguments: str,
    mounts: tuple[str, ...] = (),
    environment: Mapping[str, str | None] = {},
    descriptors: int | None = None,
    folder: str | Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run hostile_work.py; what it printed.

    Args:
        mounts: shell commands that run first, in a mount namespace.
        environment: variables; None removes one.
        descriptors: as for `ulimit -n`.
        folder: to work in.
    """
    command = [*WORK, *arguments]
    if mounts:
        if why := why_no_mounts():
            pytest.skip(f"no mount namespace: {why}")
        for needed in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
            if needed.resolve().is_relative_to("/tmp"):
                pytest.skip(f"{needed} lies in /tmp, which the test hides")
        script = " && ".join([*mounts, f"cd {folder}", 'exec "$@"'])
        command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    variables = {**os.environ, **environment}
    return subprocess.run(
        command,
        cwd=ROOT,
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
    assert_works(work("full", mounts=(LARGE.format("/tmp"),)))


def test_tmp_is_full_from_the_start() -> None:
    mounts = [each.format("/tmp") for each in (SMALL, FULL)]
    # Else Python's tempfile goes to /var/tmp.
    hidden = [each.format("/var/tmp") for each in (SMALL, FULL)]
    assert_works(work(mounts=(*mounts, *hidden)))


def test_shared_memory_is_full() -> None:
    assert_works(work(mounts=tuple(each.format("/dev/shm") for each in (SMALL, FULL))))


def test_shared_memory_is_absent() -> None:
    assert_works(work(mounts=(NO_MEMORY_FOLDER.strip(),)))


def test_tmp_is_noexec() -> None:
    assert_works(work(mounts=("mount -t tmpfs -o noexec,mode=1777 tmpfs /tmp",)))


@pytest.mark.parametrize("home", [None, "/dev/null/nobody"], ids=["unset", "unusable"])
def test_no_home(home: str | None) -> None:
    assert_works(work(environment={"HOME": home}))


def test_256_descriptors() -> None:
    assert_works(work(descriptors=256))


def test_no_room_anywhere_is_said_before_anything_is_started() -> None:
    folders = ("/tmp", "/var/tmp", "/dev/shm")
    mounts = [each.format(folder) for folder in folders for each in (SMALL, FULL)]
    done = work(mounts=tuple(mounts), folder="/tmp")  # else Python takes this folder
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "no room for the cluster's files" in last
    assert "TMPDIR" in last


@pytest.fixture
def clock(tmp_path: Path) -> dict[str, str]:
    """Variables that give processes a wall clock which can be moved."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "fake_clock.so"
    source = Path(__file__).with_name("fake_clock.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)],
        check=True,
    )
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("d", 0.0))
    return {"LD_PRELOAD": str(library), "FAKE_CLOCK": str(offset)}


def test_a_clock_that_jumps(clock: dict[str, str]) -> None:
    """An hour forth, then three hours back, each time while a rank waits."""
    assert_works(work("clock", environment=clock))


def test_a_wait_does_not_last_as_long_as_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment = Segment.create(semaphore.SEMAPHORE_BYTES)
    address = address_of(segment)
    semaphore.initialise(address)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 5)  # it was, a moment ago
    begun = time.monotonic()
    assert not semaphore.wait(address, 0.05)
    assert 0.03 < time.monotonic() - begun < 3
