"""The GPUs of NVIDIA's that the notebook may use, as NVML describes them."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil

from nbdist.clusters.hosts.gpu import Gpu
from nbdist.errors import UsageError

__all__ = ["visible_gpus"]


def visible_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that CUDA would see, in its order, and the reason if there are none.

    Raises:
        UsageError: CUDA's order is not known, and `CUDA_VISIBLE_DEVICES` has numbers of
            it; or it names a GPU twice.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return (), "the package nvidia-ml-py is not installed"
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver was found ({error})"
    try:
        present, closed = _all_gpus()
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver counts no GPUs ({error})"
    finally:
        pynvml.nvmlShutdown()
    if visible is None:
        return tuple(present.values()), _why_none(closed)
    if visible.strip() in ("", "-1", "NoDevFiles"):
        return (), f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    entries = visible.split(",")
    numbered = any(entry.strip().isdecimal() for entry in entries)
    if numbered and not _are_numbered_alike(present.values()):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible!r} numbers GPUs of different models, in an "
            "order that only CUDA knows: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the "
            "GPUs by UUID, as nvidia-smi -L shows them"
        )
    chosen: list[Gpu] = []
    for entry in entries:
        gpu = _match(entry.strip(), present)
        if gpu is None:
            break  # CUDA ignores an invalid entry and all that follow it
        if gpu in chosen:  # CUDA then sees no GPU at all
            raise UsageError(
                f"CUDA_VISIBLE_DEVICES={visible!r} names {gpu.uuid} twice: name each "
                "GPU once, and add --ranks-per-gpu 2 for two ranks on each"
            )
        chosen.append(gpu)
    return tuple(chosen), f"CUDA_VISIBLE_DEVICES={visible!r} matches no GPU"


def _are_numbered_alike(gpus: Iterable[Gpu]) -> bool:
    """Whether CUDA and NVML number the GPUs in the same order, that of the PCI bus.

    By default CUDA numbers faster GPUs first.
    """
    by_bus = os.environ.get("CUDA_DEVICE_ORDER", "").upper() == "PCI_BUS_ID"
    return by_bus or len({gpu.name for gpu in gpus}) <= 1


def _match(entry: str, present: dict[str, Gpu]) -> Gpu | None:
    """The GPU of an entry of CUDA_VISIBLE_DEVICES: an index, or a prefix of a UUID."""
    if not entry:
        return None
    if entry.isdecimal():
        whole = [gpu for gpu in present.values() if not gpu.is_mig]
        candidates = whole or list(present.values())
        index = int(entry)
        return candidates[index] if index < len(candidates) else None
    matching = [gpu for uuid, gpu in present.items() if uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _why_none(closed: list[int]) -> str:
    if not closed:
        return "no NVIDIA GPU was found"
    numbers = ", ".join(map(str, closed))
    return (
        f"GPU {numbers} is in MIG mode and has no MIG device that you may use "
        "(nvidia-smi -L lists those that there are)"
    )


def _all_gpus() -> tuple[dict[str, Gpu], list[int]]:
    """Every GPU by UUID. A GPU in MIG mode is replaced by its MIG devices.

    A GPU or MIG device that is lost, or that this user may not see, is left out.

    Returns:
        The GPUs, and the numbers of those in MIG mode that are left out because they
        have no MIG device. CUDA cannot use them as a whole.
    """
    import pynvml

    gpus: dict[str, Gpu] = {}
    closed = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            mig_devices = _mig_devices(card)
            name = _name(card, index)
            most = _most_processes(card)
        except pynvml.NVMLError:
            continue
        found = {}
        for part in [card] if mig_devices is None else mig_devices:
            try:
                uuid = pynvml.nvmlDeviceGetUUID(part)
                found[uuid] = Gpu(
                    uuid, name, _memory(part, part is card), most_processes=most
                )
            except pynvml.NVMLError:
                continue
        if mig_devices is not None and not found:
            closed.append(index)
        gpus |= found
    return gpus, closed


def _name(card: object, index: int) -> str:
    """The model of a GPU; its number if the driver does not tell.

    Raises:
        NVMLError: The GPU is lost.
    """
    import pynvml

    try:
        return str(pynvml.nvmlDeviceGetName(card))
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError:
        return f"GPU {index}"


def _most_processes(card: object) -> int | None:
    """The most processes that may use a GPU at once; None for no limit.

    In the mode "exclusive process" it is one, or the server of MPS for many.
    """
    import pynvml

    try:
        mode = pynvml.nvmlDeviceGetComputeMode(card)
    except pynvml.NVMLError:  # the first call of CUDA will say so
        return None
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return 0
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    has_mps = os.path.exists(os.path.join(pipes, "control"))
    is_exclusive = mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    return 1 if is_exclusive and not has_mps else None


def _memory(device: object, is_whole: bool) -> int | None:
    """Bytes of a GPU's memory; those of the host where the two share one memory.

    None if the driver does not tell.

    Args:
        device: NVML's handle of the GPU or MIG device.
        is_whole: Whether it is a whole GPU.

    Raises:
        NVMLError: The GPU is lost.
    """
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError_NotSupported:
        # Such as a GB10, which has no MIG.
        return int(psutil.virtual_memory().total) if is_whole else None
    except pynvml.NVMLError:
        return None


def _mig_devices(card: object) -> list[object] | None:
    """The MIG devices of a GPU that the driver tells of; None for a GPU without MIG.

    Raises:
        NVMLError: The GPU is lost.
    """
    import pynvml

    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(card)
        if current != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(card)
    except pynvml.NVMLError_GpuIsLost:
        raise
    except pynvml.NVMLError:
        return None
    parts = []
    for index in range(count):
        try:
            parts.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, index))
        except pynvml.NVMLError:
            continue  # there is none of this number, or this user may not see it
    return parts
