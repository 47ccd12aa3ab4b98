"""What the drivers' libraries tell of one GPU: NVML of NVIDIA's, amdsmi of AMD's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from nbdist.ipc import amd_smi

__all__ = ["Card", "Reading", "open_card"]

T = TypeVar("T")


class Reading(NamedTuple):
    """The state of a GPU. A field is None if the driver does not tell."""

    utilisation: float | None = None
    """Percent of the driver's last period of up to 1 s in which a kernel ran."""
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    """Bytes."""
    temperature: float | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts."""


class Card(Protocol):
    """One GPU or MIG device."""

    def read(self) -> Reading:
        """Its state now."""
        ...

    def process_memory(self, pid: int) -> int | None:
        """Bytes that a process holds on it; None if the driver does not tell."""
        ...

    def close(self) -> None:
        """Release the driver's library."""
        ...


def open_card(uuid: str) -> Card | None:
    """The GPU or MIG device with this UUID; None if no driver tells of it."""
    return NvidiaCard.find(uuid) or AmdCard.find(uuid)


class NvidiaCard:
    """A GPU or MIG device of NVIDIA's.

    A MIG device has no utilisation, and the temperature and power of its card.

    Args:
        nvml: The module pynvml, initialised.
        handle: NVML's handle of the GPU or MIG device.
        is_mig: Whether it is a MIG device.
    """

    def __init__(self, nvml: Any, handle: Any, *, is_mig: bool) -> None:
        self._nvml = nvml
        self._handle = self._card = handle
        if is_mig:
            self._card = self._ask(
                lambda n: n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            )

    @classmethod
    def find(cls, uuid: str) -> NvidiaCard | None:
        """The GPU with this UUID; None if NVML does not tell of it."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            return None
        return cls(pynvml, handle, is_mig=uuid.startswith("MIG-"))

    def read(self) -> Reading:
        """Its state now."""
        memory = self._ask(lambda n: n.nvmlDeviceGetMemoryInfo(self._handle))
        rates = self._ask(lambda n: n.nvmlDeviceGetUtilizationRates(self._handle))
        reading = Reading(
            utilisation=None if rates is None else float(rates.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
        )
        if self._card is None:
            return reading
        milliwatts = self._ask(lambda n: n.nvmlDeviceGetPowerUsage(self._card))
        return reading._replace(
            temperature=self._ask(
                lambda n: float(
                    n.nvmlDeviceGetTemperature(self._card, n.NVML_TEMPERATURE_GPU)
                )
            ),
            power=None if milliwatts is None else milliwatts / 1e3,
        )

    def process_memory(self, pid: int) -> int | None:
        """Bytes that a process holds on it; None if the driver does not tell."""
        processes = self._ask(
            lambda n: n.nvmlDeviceGetComputeRunningProcesses(self._handle)
        )
        sizes = {process.pid: process.usedGpuMemory for process in processes or ()}
        return sizes.get(pid)

    def close(self) -> None:
        """Shut NVML down."""
        self._ask(lambda n: n.nvmlShutdown())

    def _ask(self, query: Callable[[Any], T]) -> T | None:
        try:
            return query(self._nvml)
        except self._nvml.NVMLError:
            return None


class AmdCard:
    """A GPU of AMD's.

    Args:
        smi: The module amdsmi, initialised.
        handle: amdsmi's handle of the GPU.
    """

    def __init__(self, smi: Any, handle: Any) -> None:
        self._smi = smi
        self._handle = handle

    @classmethod
    def find(cls, uuid: str) -> AmdCard | None:
        """The GPU with this UUID; None if amdsmi does not tell of it."""
        try:
            smi = amd_smi.load()
        except ImportError:
            return None
        try:
            smi.amdsmi_init()
        except smi.AmdSmiException:
            return None
        handles = amd_smi.ask(smi, amd_smi.all_gpus, smi) or {}
        if uuid not in handles:
            smi.amdsmi_shut_down()
            return None
        return cls(smi, handles[uuid])

    def read(self) -> Reading:
        """Its state now. The temperature is that of its hottest place."""
        smi = self._smi
        activity = amd_smi.fields(smi, smi.amdsmi_get_gpu_activity, self._handle)
        utilisation = activity.get("gfx_activity")
        used, total = amd_smi.memory(smi, self._handle)
        power = amd_smi.fields(smi, smi.amdsmi_get_power_info, self._handle)
        # An MI300 has no average.
        watts = power.get("average_socket_power", power.get("current_socket_power"))
        degrees = amd_smi.ask(
            smi,
            smi.amdsmi_get_temp_metric,
            self._handle,
            smi.AmdSmiTemperatureType.JUNCTION,
            smi.AmdSmiTemperatureMetric.CURRENT,
        )
        return Reading(
            utilisation=None if utilisation is None else float(utilisation),
            memory_used=used,
            memory_total=total,
            temperature=None if degrees is None else float(degrees),
            power=None if watts is None else float(watts),
        )

    def process_memory(self, pid: int) -> int | None:
        """Bytes that a process holds on it; None if the driver does not tell."""
        processes = amd_smi.ask(
            self._smi, self._smi.amdsmi_get_gpu_process_list, self._handle
        )
        sizes = {
            process["pid"]: int(process["memory_usage"]["vram_mem"])
            for process in processes or ()
        }
        return sizes.get(pid)

    def close(self) -> None:
        """Release amdsmi."""
        amd_smi.ask(self._smi, self._smi.amdsmi_shut_down)
