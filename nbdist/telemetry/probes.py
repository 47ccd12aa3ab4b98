"""Samples of a rank's process and device, from /proc and from the GPU's driver.

A field of a device that is unavailable is None: a MIG device has no utilisation, a
driver may lack its library, and a GPU may fall off the bus.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from nbdist.ipc.resources import memory_limit
from nbdist.telemetry.cards import Reading, open_card
from nbdist.telemetry.proc_files import ProcFile
from nbdist.wire import DeviceSample

__all__ = ["CpuProbe", "GpuProbe", "Probe", "process_memory"]


class Probe(Protocol):
    """Takes samples of one device."""

    def sample(self, rank: int) -> DeviceSample:
        """A sample of the device and this process, since the last sample."""
        ...

    def close(self) -> None:
        """Release the probe's resources."""
        ...


class _Counters(Protocol):
    """Counts of this process and its host. None is an unknown count."""

    def resident(self) -> int:
        """Bytes of memory that this process uses."""
        ...

    def disk(self) -> int | None:
        """Bytes that this process has read from disks and written to them."""
        ...

    def network(self) -> int | None:
        """Bytes that this host has received and sent, except to itself."""
        ...

    def close(self) -> None:
        """Release the counters' resources."""
        ...


class _LinuxCounters:
    """Reads /proc. psutil takes five times as long, because it opens every file."""

    def __init__(self) -> None:
        self._statm = ProcFile("/proc/self/statm")
        self._io = ProcFile("/proc/self/io")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def resident(self) -> int:
        return int(self._statm.read().split()[1]) * self._page_bytes

    def disk(self) -> int | None:
        lines = self._io.read().splitlines()
        counts = dict(line.split(b": ") for line in lines)
        if b"read_bytes" not in counts:
            return None
        return int(counts[b"read_bytes"]) + int(counts[b"write_bytes"])

    def network(self) -> int | None:
        # Not kept open: the processes of all users share this one file.
        net = ProcFile("/proc/self/net/dev", 1 << 16)
        lines = net.read().splitlines()[2:]
        net.close()
        interfaces = [line.partition(b":") for line in lines]
        counts = [
            numbers.split() for name, _, numbers in interfaces if name.strip() != b"lo"
        ]
        return sum(int(each[0]) + int(each[8]) for each in counts) if lines else None

    def close(self) -> None:
        self._statm.close()
        self._io.close()


class _PsutilCounters:
    """The same, on a system without Linux's /proc."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._process = psutil.Process()

    def resident(self) -> int:
        return int(self._process.memory_info().rss)

    def disk(self) -> int | None:
        try:
            counters = self._process.io_counters()
        except (AttributeError, OSError, self._psutil.Error):  # not on this system
            return None
        return int(counters.read_bytes + counters.write_bytes)

    def network(self) -> int | None:
        try:
            counters = self._psutil.net_io_counters(pernic=True)
        except OSError:
            return None
        total: int = sum(
            each.bytes_recv + each.bytes_sent
            for name, each in counters.items()
            if name != "lo"
        )
        return total

    def close(self) -> None:
        pass


class _ProcessProbe:
    """Samples this process and its host."""

    def __init__(self) -> None:
        linux = os.path.exists("/proc/self/statm")
        self._counters: _Counters = _LinuxCounters() if linux else _PsutilCounters()
        self._cpu = _Rate(time.process_time)
        self._disk = _Rate(self._counters.disk)
        self._network = _Rate(self._counters.network)

    def fields(self) -> dict[str, Any]:
        """The fields of a `DeviceSample` that are those of the process or the host."""
        return {
            "time": time.time(),
            "cpu": 100 * (self._cpu.since_last() or 0.0),
            "resident": self._counters.resident(),
            "disk": self._disk.since_last(),
            "network": self._network.since_last(),
        }

    def close(self) -> None:
        """Release the counters' resources."""
        self._counters.close()


class _Rate:
    """How fast a count grows.

    Args:
        count: The count now; None if it is unknown.
    """

    def __init__(self, count: Callable[[], float | None]) -> None:
        self._count = count
        self._last = time.monotonic(), count()

    def since_last(self) -> float | None:
        """The growth per second since the last call; None if it is unknown."""
        before, old = self._last
        self._last = now, new = time.monotonic(), self._count()
        if old is None or new is None or now <= before:
            return None
        return max(0.0, (new - old) / (now - before))


class CpuProbe:
    """Samples this process: CPU time in percent of one core, and resident memory."""

    def __init__(self, device: str) -> None:
        import psutil

        self._device = device
        self._process = _ProcessProbe()
        self._total = memory_limit(psutil.virtual_memory().total)

    def sample(self, rank: int) -> DeviceSample:
        """CPU time since the last sample, and resident bytes now."""
        fields = self._process.fields()
        return DeviceSample(
            rank=rank,
            device=self._device,
            utilisation=fields["cpu"],
            memory_used=fields["resident"],
            memory_total=self._total,
            **fields,
        )

    def close(self) -> None:
        """Release the probe's files."""
        self._process.close()


class GpuProbe:
    """Samples one GPU or MIG device by its UUID, also if this process does not see it.

    Where its driver does not tell of the device, the device's fields are None.
    """

    def __init__(self, device: str, uuid: str) -> None:
        self._device = device
        self._process = _ProcessProbe()
        self._card = open_card(uuid)

    def sample(self, rank: int) -> DeviceSample:
        """The GPU's utilisation in a last period of up to 1 s, and memory now."""
        reading = Reading() if self._card is None else self._card.read()
        allocated, reserved = _in_allocator(self._device)
        return DeviceSample(
            rank=rank,
            device=self._device,
            allocated=allocated,
            reserved=reserved,
            **reading._asdict(),
            **self._process.fields(),
        )

    def close(self) -> None:
        """Release the driver's library, and the probe's files."""
        self._process.close()
        if self._card is not None:
            self._card.close()
        self._card = None


def process_memory(uuid: str, pid: int) -> int | None:
    """Bytes that a process holds on a GPU or MIG device, as the driver counts them.

    None if unavailable: in many containers the driver has other process ids than the
    container.
    """
    card = open_card(uuid)
    if card is None:
        return None
    try:
        return card.process_memory(pid)
    finally:
        card.close()


def _in_allocator(device: str) -> tuple[int | None, int | None]:
    """Bytes that torch's allocator has given out and has reserved on the device.

    None before torch uses CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None, None
    counts = torch.cuda.memory_stats_as_nested_dict(device)
    in_use, reserved = (
        counts.get(name, {}).get("all", {}).get("current", 0)
        for name in ("allocated_bytes", "reserved_bytes")
    )
    return int(in_use), int(reserved)
