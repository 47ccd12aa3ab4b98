"""Samples of a rank's process and device, from psutil, and from NVML for GPUs.

A field of a device that is unavailable is None: a MIG device has no utilisation, a
driver may lack NVML, and a GPU may fall off the bus.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from nbdist.ipc.resources import memory_limit
from nbdist.wire import DeviceSample

__all__ = ["CpuProbe", "GpuProbe", "Probe", "process_memory"]

T = TypeVar("T")


class Probe(Protocol):
    """Takes samples of one device."""

    def sample(self, rank: int) -> DeviceSample:
        """A sample of the device and this process, since the last sample."""
        ...

    def close(self) -> None:
        """Release the probe's resources."""
        ...


class CpuProbe:
    """Samples this process: CPU time in percent of one core, and resident memory."""

    def __init__(self, device: str) -> None:
        import psutil

        self._device = device
        self._process = psutil.Process()
        self._process.cpu_percent()  # starts the first interval
        self._total = memory_limit(psutil.virtual_memory().total)

    def sample(self, rank: int) -> DeviceSample:
        """CPU time since the last sample, and resident bytes now."""
        cpu = self._process.cpu_percent()
        resident = self._process.memory_info().rss
        return DeviceSample(
            rank, time.time(), self._device, cpu, resident, self._total, resident, cpu
        )

    def close(self) -> None:
        """Do nothing: this probe has no resources."""


class GpuProbe:
    """Samples one GPU or MIG device by its UUID. CUDA_VISIBLE_DEVICES has no effect.

    Without NVML, or without that device, the fields of the device are None.
    """

    def __init__(self, device: str, uuid: str) -> None:
        import psutil

        self._device = device
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._nvml: Any = _start_nvml()
        self._handle = self._ask(lambda n: n.nvmlDeviceGetHandleByUUID(uuid))

    def sample(self, rank: int) -> DeviceSample:
        """The GPU's utilisation in NVML's last period of up to 1 s, and memory now."""
        memory = self._ask_device(lambda n, h: n.nvmlDeviceGetMemoryInfo(h))
        rates = self._ask_device(lambda n, h: n.nvmlDeviceGetUtilizationRates(h))
        return DeviceSample(
            rank=rank,
            time=time.time(),
            device=self._device,
            utilisation=None if rates is None else float(rates.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            memory_own=_allocated(self._device),
            cpu=self._process.cpu_percent(),
        )

    def close(self) -> None:
        """Shut NVML down."""
        self._ask(lambda n: n.nvmlShutdown())
        self._nvml = self._handle = None

    def _ask_device(self, query: Callable[[Any, Any], T]) -> T | None:
        if self._handle is None:
            return None
        return self._ask(lambda n: query(n, self._handle))

    def _ask(self, query: Callable[[Any], T]) -> T | None:
        if self._nvml is None:
            return None
        try:
            return query(self._nvml)
        except self._nvml.NVMLError:
            return None


def process_memory(uuid: str, pid: int) -> int | None:
    """Bytes that a process holds on a GPU or MIG device, as the driver counts them.

    None if unavailable: in many containers the driver has other process ids than the
    container.
    """
    nvml = _start_nvml()
    if nvml is None:
        return None
    try:
        card = nvml.nvmlDeviceGetHandleByUUID(uuid)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(card)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    sizes = {process.pid: process.usedGpuMemory for process in processes}
    return sizes.get(pid)


def _start_nvml() -> Any:
    """The pynvml module, initialised; None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _allocated(device: str) -> int | None:
    """Bytes that torch's allocator holds on the device; None before torch uses CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_reserved(device))
