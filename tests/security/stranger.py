"""A program of another Unix user that tries to connect to a cluster's sockets.

    python stranger.py

It reads one line of JSON: "run_dir", "urls" (by channel), "pids", "uid" and "listen_s".
It becomes that user, prints "listens", and then a line of JSON: a list of what it could
read and which sockets answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import zmq
from jupyter_client.session import Session
from zmq.utils.monitor import recv_monitor_message


def main() -> None:
    """Try all attacks, and report the results."""
    order = json.loads(sys.stdin.readline())
    os.setgroups([])
    os.setgid(order["uid"])
    os.setuid(order["uid"])
    got = read_files(Path(order["run_dir"]), order["pids"])
    got += speak(order["urls"], order["listen_s"])
    print(json.dumps(got), flush=True)


def read_files(run_dir: Path, pids: list[int]) -> list[str]:
    """The readable files of the folder and environments of its processes."""
    got = []
    for folder in (run_dir, run_dir / "security"):
        with contextlib.suppress(PermissionError):
            got += [f"listed {folder}: {os.listdir(folder)}"]
    ends = ("client", "engine")
    paths = [run_dir / "security" / f"ipcontroller-{end}.json" for end in ends]
    paths += [Path(f"/proc/{pid}/environ") for pid in pids]
    for path in paths:
        with contextlib.suppress(PermissionError):
            got.append(f"read {path}: {path.read_text()}")
    return got


def speak(urls: dict[str, str], listen_s: float) -> list[str]:
    """Connect to every socket, listen, and send. Returns the sockets that answered."""
    got: list[str] = []
    context = zmq.Context()
    poller = zmq.Poller()
    names: dict[object, str] = {}
    monitors: dict[object, str] = {}
    session = Session(key=b"a guess")
    serverkey, _ = zmq.curve_keypair()
    for name, url in urls.items():
        for guesses in (False, True):
            socket = context.socket(kind(name))
            if guesses:
                public, secret = zmq.curve_keypair()
                socket.curve_serverkey = serverkey
                socket.curve_publickey, socket.curve_secretkey = public, secret
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(url)
            names[socket], monitors[monitor] = name, name
            if socket.type == zmq.SUB:
                socket.subscribe(b"")
            else:
                message = session.msg("shutdown_request", {"restart": False})
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(session.serialize(message), zmq.NOBLOCK)
            poller.register(monitor, zmq.POLLIN)
            if socket.type != zmq.PUB:
                poller.register(socket, zmq.POLLIN)
    print("listens", flush=True)
    deadline = time.monotonic() + listen_s
    while (left := deadline - time.monotonic()) > 0:
        for socket, _ in poller.poll(1000 * left):
            if socket in monitors:
                recv_monitor_message(socket)
                got.append(f"{monitors[socket]}: connected")
            else:
                got.append(f"{names[socket]}: received {socket.recv_multipart()!r}")
    context.destroy(linger=0)
    return got


def kind(name: str) -> int:
    """The type of socket that a channel of the controller accepts."""
    if name in ("client iopub", "client notification", "engine hb_ping"):
        return zmq.SUB
    return zmq.PUB if name == "engine iopub" else zmq.DEALER


if __name__ == "__main__":
    main()
