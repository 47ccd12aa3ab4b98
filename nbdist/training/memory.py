"""The memory of this rank's device: the rank's use, and its limit."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass

import psutil
import torch

from nbdist.errors import UsageError
from nbdist.ipc.resources import memory_fraction, memory_limit
from nbdist.training.device import own_device

__all__ = ["Memory", "device_memory", "memory"]


@dataclass(frozen=True)
class Memory:
    """The memory of a rank's device at one moment, in bytes."""

    device: str
    """torch's name of the device, such as "cpu" or "cuda:0"."""
    total: int
    """Memory of the GPU; on the CPU, memory of this host or container."""
    used: int
    """Memory in use by all processes, this rank included."""
    held: int
    """On a GPU, memory reserved by this rank's torch allocator; on the CPU, resident
    memory of this rank's process."""
    tensors: int | None
    """Memory of this rank's tensors on a GPU; None on the CPU, where torch does not
    count it."""
    limit: int | None
    """The most memory that this rank may use; None for no limit."""

    def __str__(self) -> str:
        tensors = "" if self.tensors is None else f" ({_gib(self.tensors)} in tensors)"
        limit = "" if self.limit is None else f", of at most {_gib(self.limit)}"
        return (
            f"{self.device}: {_gib(self.total)}, {_gib(self.used)} in use by all; this "
            f"rank holds {_gib(self.held)}{tensors}{limit}"
        )


def memory(
    limit: str | float | None = None,
    growth: bool | None = None,
    *,
    device: torch.device | str | None = None,
) -> Memory:
    """Return this rank's use of its device's memory; optionally limit it.

    Any rank may call it alone.

    Args:
        limit: the most memory that this rank may use from now on: a fraction of the
            device's memory (0.25), a size ("8GiB"), or bytes. On a GPU this limits
            torch's allocator; on the CPU, all allocations of this process. Default: the
            limit is not changed.
        growth: on a GPU, whether torch's allocator uses expandable segments, which
            lose less memory to fragmentation. It applies to new memory. Default: not
            changed.
        device: the device. Default: this rank's GPU if it has one, else the CPU.

    Raises:
        UsageError: the limit has another form, or this rank already holds more.
    """
    target = own_device() if device is None else torch.device(device)
    if limit is not None:
        _set_limit(target, limit)
    if growth is not None:
        _set_growth(target, growth)
    return device_memory(target)


def device_memory(device: torch.device) -> Memory:
    """The current memory of a device and this rank's use of it."""
    if device.type == "cuda":
        return _gpu_memory(device)
    total = memory_limit(psutil.virtual_memory().total)
    used = min(total, psutil.virtual_memory().used)
    cap = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return Memory(
        str(device),
        total,
        used,
        psutil.Process().memory_info().rss,
        None,
        None if cap == resource.RLIM_INFINITY else cap,
    )


def _gpu_memory(device: torch.device) -> Memory:
    free, total = torch.cuda.mem_get_info(device)
    fraction = _fraction(device)
    return Memory(
        str(device),
        total,
        total - free,
        torch.cuda.memory_reserved(device),
        torch.cuda.memory_allocated(device),
        None if fraction >= 1 else math.floor(fraction * total),
    )


_fractions: dict[int, float] = {}
"""The fractions that `memory` has set. torch returns them only since version 2.8."""


def _fraction(device: torch.device) -> float:
    """The fraction of the GPU's memory that torch's allocator may take."""
    tell = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if tell is not None:  # since torch 2.8
        return float(tell(device))
    return _fractions.get(device.index or 0, 1.0)


def _set_limit(device: torch.device, limit: str | float) -> None:
    now = device_memory(device)
    what = "card" if device.type == "cuda" else "machine"
    fraction = memory_fraction(limit, now.total, "limit", what)
    held = now.tensors if now.tensors is not None else _allocated_data()
    if fraction * now.total < held:
        raise UsageError(
            f"limit {limit} is {_gib(fraction * now.total)}, and this rank holds "
            f"{_gib(held)} already: delete some tensors first, or raise the limit"
        )
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        _fractions[device.index or 0] = fraction
    else:
        _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(fraction * now.total), hard))


def _set_growth(device: torch.device, growth: bool) -> None:
    if device.type != "cuda":
        return  # the CPU's allocator grows by itself
    setting = f"expandable_segments:{growth}"
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # before torch 2.9
        configure = torch.cuda.memory._set_allocator_settings
    configure(setting)


def _allocated_data() -> int:
    """Bytes that RLIMIT_DATA counts for this process, with those not yet in use."""
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")  # every Linux does


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
