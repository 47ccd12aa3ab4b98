"""What this host has: cores that we may use, and GPUs by UUID."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from nbdist.ipc.resources import cores, memory_available

__all__ = ["Gpu", "Host", "this_host"]


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one MIG device of a GPU."""

    uuid: str
    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Host:
    """One machine's share that the notebook may use."""

    name: str
    cores: int
    gpus: tuple[Gpu, ...] = ()
    why_no_gpu: str = "no NVIDIA driver was found"
    memory_available: int | None = None
    """Bytes of memory that may still be taken; None where that is not known."""


def this_host() -> Host:
    """Look at this machine: no CUDA is initialised, nothing is reserved."""
    gpus, why = _visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    memory = psutil.virtual_memory()
    available = memory_available(memory.total, memory.available)
    return Host(os.uname().nodename, cores(), gpus, why, available)


def _visible_gpus(visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that CUDA would see, in its order, and why there are none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return (), "the package nvidia-ml-py is not installed"
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver was found ({error})"
    try:
        present = _all_gpus()
    finally:
        pynvml.nvmlShutdown()
    if visible is None:
        return tuple(present.values()), "no NVIDIA GPU was found"
    if visible.strip() in ("", "-1", "NoDevFiles"):
        return (), f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    chosen = []
    for entry in visible.split(","):
        gpu = _match(entry.strip(), present)
        if gpu is None:
            break  # CUDA ignores an invalid entry and all that follow it
        chosen.append(gpu)
    return tuple(chosen), f"CUDA_VISIBLE_DEVICES={visible!r} matches no GPU"


def _match(entry: str, present: dict[str, Gpu]) -> Gpu | None:
    """An entry of CUDA_VISIBLE_DEVICES: an index, or a UUID that may be cut short."""
    if entry.isdigit():
        whole = [gpu for gpu in present.values() if not gpu.uuid.startswith("MIG-")]
        candidates = whole or list(present.values())
        index = int(entry)
        return candidates[index] if index < len(candidates) else None
    matching = [gpu for uuid, gpu in present.items() if uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _all_gpus() -> dict[str, Gpu]:
    """Every GPU by UUID; one that is split by MIG stands for its MIG devices."""
    import pynvml

    gpus = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for part in _mig_devices(handle) or [handle]:
            gpu = Gpu(
                uuid=pynvml.nvmlDeviceGetUUID(part),
                name=pynvml.nvmlDeviceGetName(handle),
                memory=int(pynvml.nvmlDeviceGetMemoryInfo(part).total),
            )
            gpus[gpu.uuid] = gpu
    return gpus


def _mig_devices(handle: object) -> list[object]:
    import pynvml

    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
        if current != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError_NotSupported:
        return []
    parts = []
    for index in range(count):
        try:
            parts.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except pynvml.NVMLError_NotFound:
            continue
    return parts
