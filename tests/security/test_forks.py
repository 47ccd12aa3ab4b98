"""A second Unix user gets no process of a rank host, and shares none of its memory."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from nbdist.ipc.fork_messages import receive, socket_address
from tests.security.other_user import OWNER, STRANGER, home_of, start, why_not

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user"
)
HOST = """
import os, socket, sys
from nbdist.ipc import fork_server
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
print("listens", flush=True)
nothing = fork_server._Stamps({}), fork_server._Shadows(), []
fork_server._RankHost(listener, *nothing).run()
"""
TIMEOUT_S = 60.0
SHARED = (Path("/tmp"), Path("/dev/shm"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike a cluster's."""
    made = Path(tempfile.mkdtemp(prefix="open-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def asked_by_a_stranger(path: Path) -> object:
    """What another user gets who asks a rank host for a process."""
    command = [sys.executable, "-m", "tests.security.fork_stranger"]
    done = subprocess.run(
        [*command, str(STRANGER), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    return json.loads(done.stdout)


def test_a_rank_host_refuses_another_user(open_folder: Path) -> None:
    path = open_folder / "socket"
    with subprocess.Popen(
        [sys.executable, "-c", HOST, str(path)], stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "listens\n"
        assert asked_by_a_stranger(path) is None
        with socket.socket(socket.AF_UNIX) as supervisor:
            with socket_address(path) as address:
                supervisor.connect(address)
            supervisor.settimeout(TIMEOUT_S)
            hello = receive(supervisor)
            assert hello == ({"pid": host.pid}, []), "the stranger was not the first"
            assert asked_by_a_stranger(path) is None
            assert psutil.Process(host.pid).children() == []
        assert host.wait(TIMEOUT_S) == 0


def identities(pid: int) -> dict[tuple[int, int], str]:
    """The open files and the shared mappings of a process: (device, inode), and name.

    Devices such as /dev/null are left out, and so are kernel objects without a name,
    which all have one inode.
    """
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed, such as that of this listing
            target, status = os.readlink(link), link.stat()
            if not (target.startswith("anon_inode:") or stat.S_ISCHR(status.st_mode)):
                found[status.st_dev, status.st_ino] = target
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, permissions, _, device, inode, *name = line.split(maxsplit=5)
        if permissions[3] == "s" and inode != "0":
            major, minor = (int(number, 16) for number in device.split(":"))
            found[os.makedev(major, minor), int(inode)] = "".join(name)
    return found


def open_to_others(uid: int) -> set[str]:
    """The names of a user in the folders of all, on which others have permissions."""
    found = set()
    for folder in SHARED:
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # another process's, gone again
                status = path.lstat()
                if status.st_uid == uid and stat.S_IMODE(status.st_mode) & 0o077:
                    found.add(str(path))
    return found


@pytest.mark.timeout(300)
def test_clusters_of_two_users_share_nothing() -> None:
    if why := why_not():
        pytest.skip(why)
    users = (OWNER, STRANGER)
    before = {uid: open_to_others(uid) for uid in users}
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                start(
                    uid,
                    stack.enter_context(home_of(uid)),
                    ["-m", "tests.security.fork_owner"],
                )
            )
            for uid in users
        ]
        pids = []
        for program in programs:
            assert program.stdout is not None
            pids.append(json.loads(program.stdout.readline()))
        assert not set(pids[0]) & set(pids[1])
        held: list[dict[tuple[int, int], str]] = []
        for uid, own in zip(users, pids, strict=True):
            assert len(own) >= 10, "with fork server, rank host and ranks"
            assert {psutil.Process(pid).uids() for pid in own} == {(uid, uid, uid)}
            held.append({k: v for pid in own for k, v in identities(pid).items()})
            assert open_to_others(uid) == before[uid]
            # Without ranks that share memory, the comparison would say nothing.
            assert any("sm_segment" in name for name in held[-1].values())
        of_this_test = identities(os.getpid()).keys()  # such as its standard error
        common = held[0].keys() & held[1].keys() - of_this_test
        assert [held[0][each] for each in common] == []
        for program in programs:
            assert program.stdin is not None
            program.stdin.close()
        assert [program.wait(TIMEOUT_S) for program in programs] == [0, 0]
