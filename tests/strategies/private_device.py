"""Loads the device of private_device.cpp, under the name "private"."""

from __future__ import annotations

import ctypes
from types import ModuleType

import torch


def load(library: str) -> torch.device:
    """The device of a compiled library."""
    torch.utils.rename_privateuse1_backend("private")
    torch.ops.load_library(library)
    module = ModuleType("torch.private")
    vars(module).update(  # what torch asks of such a module
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda _: None,
    )
    torch._register_device_module("private", module)
    return torch.device("private")


def waits(library: str) -> int:
    """How often this process has waited for the device."""
    return int(ctypes.CDLL(library).private_device_waits())
