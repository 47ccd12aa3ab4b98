"""Orders calls that another thread makes after a device's work, on any kind of device.

torch has one interface to the accelerator that it was built for (`torch.accelerator`),
and a module for most kinds of device (`torch.get_device_module`), such as `torch.xpu`
or that of a backend under PrivateUse1. A device without either, such as XLA's, orders
its work itself: a copy to the host waits for all that the tensor depends on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nbdist.collectives.sync.cuda_events import on_side_stream
from nbdist.collectives.sync.wait import Check

__all__ = ["for_any_thread", "synchronize"]

_ON_HOST = frozenset({"cpu", "none"})
"""Devices of calls that queue no work: tensors in host memory, and no tensors."""


def synchronize(device: torch.device) -> None:
    """Wait for the work that is queued on a device, on all of its streams."""
    current = torch.accelerator.current_accelerator()
    if current is not None and current.type == device.type:
        torch.accelerator.synchronize()
        return
    try:
        module = torch.get_device_module(device.type)
    except RuntimeError:  # the device has none
        return
    if hasattr(module, "synchronize"):
        module.synchronize()


def for_any_thread(
    body: Callable[[], object], kind: str, check: Check
) -> Callable[[], object]:
    """Wrap `body` so that another thread can run it.

    Its work comes after the work that is queued now, and is done when it returns.

    Args:
        body: the work of a call.
        kind: the type of the call's device. With "cuda", this thread's current device
            and stream are the call's.
        check: called while waiting; ends the wait by raising.
    """
    if kind in _ON_HOST:
        return body
    if kind == "cuda":
        return on_side_stream(body, check)
    device = torch.device(kind)

    def run() -> None:
        synchronize(device)
        body()
        synchronize(device)

    return run
