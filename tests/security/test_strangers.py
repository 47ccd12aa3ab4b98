"""Another user of the machine can neither read nor send messages of a cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist import Cluster
from tests.processes import wait_until
from tests.security.attack import (
    attack,
    connection,
    genuine_requests,
    processes,
    refused,
)
from tests.seed import SEED

STRANGER = Path(__file__).with_name("stranger.py")
UID = 54_321
"""Of a user who need not exist: the kernel knows numbers alone."""
LISTEN_S = 3.0
DEADLINE_S = 60.0
MOST_OF_A_SOCKET_PATH = 107


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[Cluster]:
    """A cluster whose folder's name is too long for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="x" * MOST_OF_A_SOCKET_PATH))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        with Cluster(2, device="cpu") as cluster:
            yield cluster
    shutil.rmtree(folder)


@pytest.fixture(params=["ipc", "tcp"])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """A cluster with Unix sockets, and a cluster with TCP."""
    name = "cluster" if request.param == "ipc" else "over_tcp"
    cluster: Cluster = request.getfixturevalue(name)
    info = connection(cluster._live().run_dir, "client")
    assert info["interface"].startswith(f"{request.param}://")
    return cluster


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_receives_nothing_and_changes_nothing(any_cluster: Cluster):
    run_dir = any_cluster._live().run_dir
    ports = {
        f"{end} {channel}": (info["interface"], port)
        for end in ("client", "engine")
        for info in [connection(run_dir, end)]
        for channel, port in info.items()
        if isinstance(port, int)
    }
    order = {
        "run_dir": str(run_dir),
        "urls": {name: f"{at}:{port}" for name, (at, port) in ports.items()},
        "pids": [process.pid for process in processes(any_cluster)],
        "uid": UID,
        "listen_s": LISTEN_S,
    }
    before = any_cluster.status()
    with subprocess.Popen(
        [sys.executable, STRANGER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        stranger.stdin.write(json.dumps(order) + "\n")
        stranger.stdin.flush()
        assert stranger.stdout.readline() == "listens\n"
        result = any_cluster.execute(
            "print('a secret'); nbdist.log(loss=1.0)", timeout_s=DEADLINE_S
        )
        got = json.loads(stranger.stdout.readline())
    assert got == []
    assert {r.stdout for r in result.ranks.values()} == {"a secret\n"}
    after = any_cluster.status()
    assert any_cluster.died() == {}
    assert any_cluster.refused(after) == any_cluster.refused(before)


def test_no_key_is_on_a_command_line_or_in_an_environment(any_cluster: Cluster):
    info = connection(any_cluster._live().run_dir, "client")
    keys = [info["key"], info["curve_serverkey"]]
    assert len(info["key"]) == 64
    for process in processes(any_cluster):
        try:
            public = " ".join(process.cmdline()) + repr(process.environ())
        except psutil.NoSuchProcess:  # it ended meanwhile: psutil calls it a zombie
            continue
        assert [key for key in keys if key and key in public] == []


def test_invalid_messages_of_a_holder_of_the_key_are_refused_over_tcp(
    over_tcp: Cluster,
):
    before = refused(over_tcp)
    counted = attack(over_tcp, 1000, genuine_requests(over_tcp), SEED)
    over_tcp.execute("pass", timeout_s=DEADLINE_S)
    wait_until(lambda: refused(over_tcp) == before + counted, DEADLINE_S)


def test_a_rank_that_dies_is_replaced_over_tcp(over_tcp: Cluster):
    os.kill(over_tcp.infos[1].pid, signal.SIGKILL)
    wait_until(lambda: bool(over_tcp.died()), DEADLINE_S)
    over_tcp.execute("x = torch.ones(1); nbdist.all_reduce(x)", timeout_s=DEADLINE_S)
    assert over_tcp["x.item()"] == [2.0, 2.0]
