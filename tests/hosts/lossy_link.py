"""A cable between a host and a switch that delays packets and loses some.

It is a program of its own: it holds both ends, each a device of another network
namespace, for as long as it runs.

    python lossy_link.py SWITCH_PID DEVICE HOST_PID DEVICE DELAY_S LOSS SEED
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 65_600


def plug(pid: int, device: str) -> int:
    """Make a device in the network namespace of a process. Returns its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to that of {pid}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI)
    fcntl.ioctl(end, TUNSETIFF, request)
    return end


def carry(ends: tuple[int, int], delay_s: float, loss: float, seed: str) -> None:
    """Carry the packets of both directions, for ever."""
    rng = random.Random(seed)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: deque[tuple[float, int, bytes]] = deque()  # in the order of their times
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    while True:
        wait_s = under_way[0][0] - time.monotonic() if under_way else None
        ready = poll.poll(None if wait_s is None else max(0.0, wait_s * 1000))
        for end, _ in ready:
            with contextlib.suppress(OSError):  # the device is down
                frame = os.read(end, FRAME_BYTES)
                if rng.random() >= loss:
                    under_way.append((time.monotonic() + delay_s, other[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            with contextlib.suppress(OSError):
                os.write(end, frame)


if __name__ == "__main__":
    switch, port, host, device, delay, lost, drawn_from = sys.argv[1:]
    both = plug(int(switch), port), plug(int(host), device)
    print("plugged in", flush=True)
    carry(both, float(delay), float(lost), drawn_from)
