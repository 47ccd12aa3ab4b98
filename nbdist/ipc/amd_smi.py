"""AMD's library for its GPUs: the package amdsmi, of ROCm 6.2 or later.

It describes the GPUs without HIP, as NVML does without CUDA. A caller initialises it
with `amdsmi_init` and ends with `amdsmi_shut_down`: the library counts its users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["all_gpus", "ask", "fields", "load", "memory"]

UNKNOWN = "N/A"
"""What a field of an answer is if the GPU does not have it."""
MEBIBYTE = 2**20

T = TypeVar("T")


def load() -> Any:
    """The module amdsmi.

    Raises:
        ImportError: The package or its library is not installed.
    """
    try:
        import amdsmi
    except (KeyError, OSError) as error:  # the package is there, its library is not
        raise ImportError(f"libamd_smi.so cannot be loaded: {error}") from error
    return amdsmi


def all_gpus(smi: Any) -> dict[str, Any]:
    """The handle of each GPU by its UUID, in HIP's order.

    The UUID is HIP's: "GPU-" and 16 hexadecimal digits. A GPU without one, and each
    partition of a GPU, has its PCI address instead. A GPU that does not answer is left
    out.

    Before ROCm 6.4 HIP's order is not known, and is that of amdsmi.

    Raises:
        AmdSmiException: The driver counts no GPUs.
    """
    handles = smi.amdsmi_get_processor_handles()
    uuids = [_uuid(smi, handle) for handle in handles]
    counts = Counter(uuids)
    found = []
    for number, (handle, uuid) in enumerate(zip(handles, uuids, strict=True)):
        address = ask(smi, smi.amdsmi_get_gpu_device_bdf, handle)
        identity = uuid if uuid and counts[uuid] == 1 else address
        if identity:
            found.append((_hip_number(smi, handle, number), str(identity), handle))
    found.sort(key=lambda each: each[0])
    return {identity: handle for _, identity, handle in found}


def ask(smi: Any, query: Callable[..., T], *arguments: Any) -> T | None:
    """The answer to a query; None if the driver or the GPU has none."""
    try:
        return query(*arguments)
    except smi.AmdSmiException:
        return None


def fields(
    smi: Any, query: Callable[[Any], dict[str, Any]], gpu: Any
) -> dict[str, Any]:
    """The fields of the answer to a query of a GPU, without those it does not have."""
    answer = ask(smi, query, gpu) or {}
    return {name: value for name, value in answer.items() if value != UNKNOWN}


def memory(smi: Any, gpu: Any) -> tuple[int | None, int | None]:
    """Bytes of a GPU's memory: those in use, and all; None if it does not tell."""
    sizes = fields(smi, smi.amdsmi_get_gpu_vram_usage, gpu)
    used, total = sizes.get("vram_used"), sizes.get("vram_total")
    return (
        None if used is None else used * MEBIBYTE,
        None if total is None else total * MEBIBYTE,
    )


def _uuid(smi: Any, handle: Any) -> str | None:
    serial = fields(smi, smi.amdsmi_get_gpu_asic_info, handle).get("asic_serial", "")
    digits = str(serial).lower().removeprefix("0x")
    return f"GPU-{digits}" if digits.strip("0") else None


def _hip_number(smi: Any, handle: Any, otherwise: int) -> int:
    """HIP's number of a GPU where no environment variable hides any."""
    if not hasattr(smi, "amdsmi_get_gpu_enumeration_info"):
        return otherwise
    info = fields(smi, smi.amdsmi_get_gpu_enumeration_info, handle)
    return int(info.get("hip_id", otherwise))
