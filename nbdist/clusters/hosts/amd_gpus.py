"""The GPUs of AMD's that the notebook may use, as amdsmi describes them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist.clusters.hosts.gpu import Gpu
from nbdist.ipc import amd_smi

__all__ = ["torch_is_built_for_them", "visible_gpus"]


def torch_is_built_for_them() -> bool:
    """Whether the installed torch is a ROCm build. It is not imported."""
    try:
        torch = importlib.util.find_spec("torch")
    except ValueError:  # a module of this name has no specification
        return False
    folders = (torch and torch.submodule_search_locations) or ()
    return any((Path(each) / "lib" / "libtorch_hip.so").exists() for each in folders)


def visible_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that HIP would see, in its order, and the reason if there are none.

    `ROCR_VISIBLE_DEVICES` applies first. `HIP_VISIBLE_DEVICES`, or without it
    `CUDA_VISIBLE_DEVICES`, numbers those that are left.
    """
    try:
        smi = amd_smi.load()
    except ImportError as error:
        return (), f"torch is built for AMD's GPUs, but amdsmi is missing ({error})"
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException as error:
        return (), f"no AMD driver was found ({error})"
    try:
        present = [_gpu(smi, *item) for item in amd_smi.all_gpus(smi).items()]
    except smi.AmdSmiException as error:
        return (), f"the AMD driver counts no GPUs ({error})"
    finally:
        smi.amdsmi_shut_down()
    if not present:
        return (), "no AMD GPU was found"
    left = _chosen(present, os.environ.get("ROCR_VISIBLE_DEVICES"))
    if not left:
        return (), _matches_none("ROCR_VISIBLE_DEVICES")
    numbered = [replace(gpu, hip_number=number) for number, gpu in enumerate(left)]
    by_hip = "HIP_VISIBLE_DEVICES" in os.environ
    name = "HIP_VISIBLE_DEVICES" if by_hip else "CUDA_VISIBLE_DEVICES"
    return tuple(_chosen(numbered, os.environ.get(name))), _matches_none(name)


def _chosen(gpus: Sequence[Gpu], visible: str | None) -> Sequence[Gpu]:
    """The GPUs of a variable's entries, numbers or UUIDs. None stands for all GPUs."""
    if visible is None:
        return gpus
    chosen = []
    for entry in visible.split(","):
        gpu = _match(entry.strip().lower(), gpus)
        if gpu is None:
            break  # HIP ignores an invalid entry and all that follow it
        if gpu not in chosen:
            chosen.append(gpu)
    return chosen


def _match(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    return next((gpu for gpu in gpus if gpu.uuid.lower() == entry), None)


def _matches_none(variable: str) -> str:
    return f"{variable}={os.environ.get(variable)!r} matches no GPU"


def _gpu(smi: Any, uuid: str, handle: Any) -> Gpu:
    chip = amd_smi.fields(smi, smi.amdsmi_get_gpu_asic_info, handle)
    _, total = amd_smi.memory(smi, handle)
    return Gpu(uuid, str(chip.get("market_name", "AMD GPU")), total)
