"""A machine's resources: its cores, its memory and its GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from nbdist.clusters.hosts import amd_gpus, nvidia_gpus
from nbdist.clusters.hosts.gpu import Gpu
from nbdist.ipc.resources import cores, host_name, memory_available

__all__ = ["Host", "this_host"]


@dataclass(frozen=True)
class Host:
    """The part of one machine that the notebook may use."""

    name: str
    cores: int
    gpus: tuple[Gpu, ...] = ()
    why_no_gpu: str = "no NVIDIA driver was found"
    memory_available: int | None = None
    """Bytes of available memory; None if not known."""


def this_host() -> Host:
    """Describe this host, without initialising CUDA or HIP or reserving memory.

    Its GPUs are of the vendor for which the installed torch is built.

    Raises:
        UsageError: `CUDA_VISIBLE_DEVICES` does not say which GPUs are meant.
    """
    vendor = amd_gpus if amd_gpus.torch_is_built_for_them() else nvidia_gpus
    gpus, why = vendor.visible_gpus()
    memory = psutil.virtual_memory()
    available = memory_available(memory.total, memory.available)
    return Host(host_name(), cores(), gpus, why, available)
