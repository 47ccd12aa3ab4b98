"""A stand-in for AMD's package amdsmi, with the calls and answers of its version 7.0.

It is imported as `amdsmi` where its folder is on the path. A field of a GPU that is an
`AmdSmiException` is raised.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class AmdSmiException(Exception):
    """Any error of the driver."""


class AmdSmiTemperatureType(enum.IntEnum):
    EDGE = 0
    JUNCTION = 1


class AmdSmiTemperatureMetric(enum.IntEnum):
    CURRENT = 0


@dataclass
class Gpu:
    """A GPU. By default an MI300X, which has no average power."""

    serial: Any = "0x0123456789ABCDEF"
    address: Any = "0000:05:00.0"
    hip_id: Any = 0
    name: Any = "AMD Instinct MI300X"
    vram: Any = (196_592, 1024)
    """MiB in total and in use."""
    activity: Any = 97
    degrees: Any = 61
    average_watts: Any = "N/A"
    watts: Any = 540
    processes: Any = ()
    """Process ids and the bytes that they hold."""


GPUS = [
    Gpu("0x0123456789ABCDEF", "0000:05:00.0", 0),
    Gpu("0xFEDCBA9876543210", "0000:26:00.0", 1),
]
users = 0
"""How often the library was initialised, less how often it was shut down."""
DRIVER: Any = None


def answer(value: Any) -> Any:
    if isinstance(value, AmdSmiException):
        raise value
    return value


def amdsmi_init() -> None:
    global users
    answer(DRIVER)
    users += 1


def amdsmi_shut_down() -> None:
    global users
    users -= 1


def amdsmi_get_processor_handles() -> list[Gpu]:
    return list(answer(GPUS))


def amdsmi_get_gpu_asic_info(gpu: Gpu) -> dict[str, Any]:
    return {"asic_serial": answer(gpu.serial), "market_name": answer(gpu.name)}


def amdsmi_get_gpu_device_bdf(gpu: Gpu) -> str:
    return str(answer(gpu.address))


def amdsmi_get_gpu_enumeration_info(gpu: Gpu) -> dict[str, Any]:
    return {"hip_id": answer(gpu.hip_id)}


def amdsmi_get_gpu_vram_usage(gpu: Gpu) -> dict[str, int]:
    total, used = answer(gpu.vram)
    return {"vram_total": total, "vram_used": used}


def amdsmi_get_gpu_activity(gpu: Gpu) -> dict[str, Any]:
    return {"gfx_activity": answer(gpu.activity), "umc_activity": 0}


def amdsmi_get_temp_metric(
    gpu: Gpu, kind: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric
) -> int:
    assert (kind, metric) == (
        AmdSmiTemperatureType.JUNCTION,
        AmdSmiTemperatureMetric.CURRENT,
    )
    return int(answer(gpu.degrees))


def amdsmi_get_power_info(gpu: Gpu) -> dict[str, Any]:
    return {
        "average_socket_power": answer(gpu.average_watts),
        "current_socket_power": answer(gpu.watts),
    }


def amdsmi_get_gpu_process_list(gpu: Gpu) -> list[dict[str, Any]]:
    return [
        {"pid": pid, "memory_usage": {"vram_mem": held}}
        for pid, held in answer(gpu.processes)
    ]
