"""torch's settings of this process, which a rank that joins takes from another rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

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
    for name, read in _READERS.items():
        # torch refuses to read a setting of which a part was set in a newer way.
        with contextlib.suppress(RuntimeError):
            found[name] = read()
    return found


def adopt_settings(wanted: dict[str, Any]) -> None:
    """Take the settings of another rank. Call from the main thread.

    Args:
        wanted: As `settings` returns them. What is as it is wanted is not touched.
    """
    present = settings()
    changed = {
        name: value for name, value in wanted.items() if value != present.get(name)
    }
    for name, value in changed.items():
        _set(name, value)


def _set(name: str, value: Any) -> None:
    match name:
        case "default dtype":
            torch.set_default_dtype(getattr(torch, value))
        case "default device":
            own = this_rank().info.device
            torch.set_default_device(own if value == OWN_DEVICE else value)
        case "gradients":
            torch.set_grad_enabled(value)
        case "deterministic":
            enabled, warn_only = value
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        case "anomalies":
            enabled, check_nan = value
            torch.autograd.set_detect_anomaly(enabled, check_nan)
        case "matmul precision":
            torch.set_float32_matmul_precision(value)
        case "cudnn":
            cudnn = torch.backends.cudnn
            cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = value


def _default_device() -> str:
    device = torch.get_default_device()
    if device.type == "cuda" and str(device) == this_rank().info.device:
        return OWN_DEVICE
    return str(device)


_READERS: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "default device": _default_device,
    "gradients": torch.is_grad_enabled,
    "deterministic": lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ),
    "anomalies": lambda: (
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
    ),
    "matmul precision": torch.get_float32_matmul_precision,
    "cudnn": lambda: (
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    ),
}
