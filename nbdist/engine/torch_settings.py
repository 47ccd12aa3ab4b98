"""torch's settings of this process, which a rank that joins takes from another rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nbdist.engine.rank import this_rank

__all__ = ["adopt_settings", "settings"]

OWN_DEVICE = "own"
"""A rank's own GPU, which has another number on another rank."""


def settings() -> dict[str, Any]:
    """The settings by which tensors and results of ranks differ, in plain values.

    The number of threads is not among them, because nbdist sets it for each rank.
    """
    found = {}
    for name, setting in _SETTINGS.items():
        # torch refuses to read a setting of which a part was set in a newer way.
        with contextlib.suppress(RuntimeError):
            found[name] = setting.read()
    return found


def adopt_settings(wanted: dict[str, Any]) -> None:
    """Take the settings of another rank. Call from the main thread.

    Args:
        wanted: As `settings` returns them. What is as it is wanted is not touched.
    """
    present = settings()
    for name, value in wanted.items():
        if value != present.get(name):
            _SETTINGS[name].set(value)


class _Setting(NamedTuple):
    read: Callable[[], Any]
    set: Callable[[Any], object]


def _default_device() -> str:
    device = torch.get_default_device()
    if device.type == "cuda" and str(device) == this_rank().info.device:
        return OWN_DEVICE
    return str(device)


def _set_default_device(device: str) -> None:
    own = this_rank().info.device
    torch.set_default_device(own if device == OWN_DEVICE else device)


def _cudnn() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic


def _set_cudnn(values: tuple[bool, bool, bool]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = values


_SETTINGS = {
    "default dtype": _Setting(
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "default device": _Setting(_default_device, _set_default_device),
    "gradients": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic": _Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda values: torch.use_deterministic_algorithms(
            values[0], warn_only=values[1]
        ),
    ),
    "anomalies": _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.autograd.set_detect_anomaly(*values),
    ),
    "matmul precision": _Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "cudnn": _Setting(_cudnn, _set_cudnn),
}
