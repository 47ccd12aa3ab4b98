"""Foreign messages are counted and have no effect."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from nbdist import Cluster
from nbdist.ipc import endpoints, serialization
from nbdist.ipc.direct_socket import DirectSocket, brief_packet, path_of
from nbdist.session import Session
from tests.processes import wait_until
from tests.security.attack import (
    Recorder,
    Sender,
    attack,
    genuine_requests,
    refused,
    targets,
)
from tests.seed import SEED

DEADLINE_S = 60.0

TRAINING = """
import pathlib
folder = pathlib.Path({folder!r})
steps, weight = 0, torch.zeros(1000, dtype=torch.float64)
while True:
    gradient = torch.full((1000,), float(rank + steps), dtype=torch.float64)
    nbdist.all_reduce(gradient)
    weight += gradient
    steps += 1
    nbdist.log(loss=float(steps), step=steps)
    print(f"step {{steps}}")
    if rank == 0 and steps == 5:
        (folder / "trains").touch()
    over = torch.tensor([float((folder / "over").exists())])
    nbdist.broadcast(over, 0)
    if over.item():
        break
"""


@pytest.fixture
def genuine(cluster: Cluster) -> list[list[bytes]]:
    return genuine_requests(cluster)


@pytest.mark.parametrize(
    "count",
    [3000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_invalid_messages_to_every_socket_do_not_disturb_a_training(
    cluster: Cluster, genuine: list[list[bytes]], count: int, tmp_path: Path
):
    before = refused(cluster)
    counted: list[int] = []

    def disturb() -> None:
        try:
            wait_until((tmp_path / "trains").exists, DEADLINE_S)
            counted.append(attack(cluster, count, genuine, SEED))
        finally:
            (tmp_path / "over").touch()

    attacker = threading.Thread(target=disturb)
    attacker.start()
    code = TRAINING.format(folder=str(tmp_path))
    result = cluster.execute(code, timeout_s=DEADLINE_S * (1 + count // 1000))
    attacker.join(DEADLINE_S)
    (steps,) = set(cluster["steps"])
    lines = "".join(f"step {step + 1}\n" for step in range(steps))
    assert [result.ranks[rank].stdout for rank in range(4)] == [lines] * 4
    expected = float(sum(4 * step + 6 for step in range(steps)))
    assert cluster["weight.max().item()"] == [expected] * 4
    for word in ("next", "one more"):
        answer = cluster.execute(f"print({word!r})", timeout_s=DEADLINE_S)
        assert [answer.ranks[rank].stdout for rank in range(4)] == [f"{word}\n"] * 4
    wait_until(
        lambda: refused(cluster) - before == counted[0],
        DEADLINE_S,
        lambda: f"{refused(cluster) - before} of {counted[0]} were counted",
    )
    assert cluster.died() == {}


def test_the_status_shows_the_number_of_refused_messages(
    cluster: Cluster, genuine: list[list[bytes]]
):
    before = refused(cluster)
    expected = before + attack(cluster, 60, genuine, SEED)
    wait_until(lambda: refused(cluster) == expected, DEADLINE_S)
    session = Session()
    session._cluster = cluster
    text = repr(session.status_table())
    session._cluster = None
    assert f"; {expected:,} messages were refused: wrongly signed, damaged" in text


def test_a_request_that_is_sent_again_runs_once(cluster: Cluster):
    cluster.execute("runs = 0")
    registry = cluster._live()
    client = registry.client._client
    with Recorder(client) as recorder:
        cluster.execute("runs += 1")
    before = refused(cluster)
    uuids = [info.engine_uuid for info in registry.infos]
    ways = [target for target in targets(registry.run_dir, uuids) if target.counted]
    cells = [frames[1:] for frames in recorder.sent if b"cells" in b"".join(frames)]
    assert len(cells) == 4
    with Sender(registry.run_dir, ways) as sender:
        for way in ways:
            for body in cells:
                sender.send(way, body)
    wait_until(lambda: refused(cluster) == before + 4 * len(ways), DEADLINE_S)
    assert cluster["runs"] == [1] * 4


class Changing:
    """Sends each message twice: with a changed argument, then as it is."""

    header = None
    """A direct socket without a header is not trusted, so that messages are signed."""

    def __init__(self, end: Any) -> None:
        self._send = end.send_multipart
        self.sent = 0

    def send_multipart(self, frames: list[Any], **options: Any) -> None:
        changed = [bytes(frame) for frame in frames]
        assert b"x.append(1)" in changed[-1]
        changed[-1] = changed[-1].replace(b"x.append(1)", b"x.append(2)")
        self._send(changed, **options)
        self._send(frames, **options)
        self.sent += 1

    def send(self, packet: list[Any]) -> None:
        self.send_multipart(packet[1:])  # without the sizes of the frames


@pytest.mark.parametrize("way", ["controller", "direct sockets"])
def test_changed_arguments_are_not_unpickled(
    cluster: Cluster, way: str, monkeypatch: pytest.MonkeyPatch
):
    client = cluster._live().client._client
    cluster.execute("x = []")
    before = refused(cluster)
    with monkeypatch.context() as patched:
        if way == "controller":
            patched.setattr(client, "direct", dict.fromkeys(client.direct))
            ends = [Changing(client._mux_stream)]
            patched.setattr(
                client._mux_stream, "send_multipart", ends[0].send_multipart
            )
        else:
            changing = {uuid: Changing(end) for uuid, end in client.direct.items()}
            patched.setattr(client, "direct", changing)
            ends = [*changing.values()]
        cluster.execute("x.append(1)", timeout_s=DEADLINE_S)
    assert sum(end.sent for end in ends) == 4
    assert cluster["x"] == [[1]] * 4
    assert refused(cluster) == before + 4


def test_a_brief_message_counts_only_after_a_signed_one(cluster: Cluster):
    cluster.execute("x = []")
    registry = cluster._live()
    before = refused(cluster)
    frames = serialization.dumps((("x.append(1)", 1), {}))
    with contextlib.ExitStack() as stack:
        for info in registry.infos:
            path = path_of(registry.run_dir, info.engine_uuid)
            stranger = DirectSocket.connect(path)
            stack.callback(stranger.close)
            stranger.send(brief_packet(("a name", endpoints.RUN_CELL, "In[1]"), frames))
        wait_until(lambda: refused(cluster) == before + 4, DEADLINE_S)
    assert cluster["x"] == [[]] * 4
    client = registry.client._client
    assert all(direct.header is not None for direct in client.direct.values())


def test_bytes_of_another_protocol_lose_no_message(cluster: Cluster):
    """A program may send bytes of another protocol to the wrong socket."""
    rng = random.Random(SEED)
    # ZeroMQ's oldest protocol has no handshake: an empty name, then one frame.
    alone = b"\x01\x00" + b"\x02\x00x"
    paths = sorted(map(str, cluster._live().run_dir.glob("zmq:*")))
    assert len(paths) > 10
    with contextlib.ExitStack() as stack:
        for path in paths:
            for noise in (b"", alone, *(rng.randbytes(5000) for _ in range(5))):
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(path)
                with contextlib.suppress(BrokenPipeError):  # refused already
                    client.sendall(noise)
        registry = cluster._live()
        for info in registry.infos:
            path = path_of(registry.run_dir, info.engine_uuid)
            for noise in (b"x", b"", *(rng.randbytes(5000) for _ in range(5))):
                packets = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(packets).connect(str(path))
                packets.send(noise)
        for _ in range(3):
            result = cluster.execute("print('here')", timeout_s=DEADLINE_S)
            assert [result.ranks[rank].stdout for rank in range(4)] == ["here\n"] * 4
