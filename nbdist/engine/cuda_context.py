"""A rank whose CUDA context has failed: what its errors say, and how it ends.

After some errors, such as an illegal memory access or a device-side assert, each later
call of CUDA in the process raises the same error. Only a new process can use the GPU.
"""

from __future__ import annotations

from typing import NoReturn

from nbdist.engine.rank import this_rank
from nbdist.training.device import context_error

__all__ = ["advice", "end_rank"]


def advice() -> str:
    """What to do about this rank's failed CUDA context; "" while the context works."""
    failed = context_error()
    if failed is None:
        return ""
    info = this_rank().info
    return (
        f"The CUDA context of rank {info.rank} on {_card()} has failed ({failed}): "
        "every later call of CUDA in this process raises this error. Pull the "
        f"variables in host memory that you need, then %dist_restart -r {info.rank} "
        "replaces the process. CUDA_LAUNCH_BLOCKING=1 shows the line that failed"
    )


def end_rank(reason: str) -> NoReturn:
    """End this process. The notebook replaces or drops the rank, as it is configured.

    Args:
        reason: The error of the CUDA context.
    """
    this_rank().end(f"its CUDA context on {_card()} has failed ({reason})")


def _card() -> str:
    info = this_rank().info
    return " ".join(filter(None, (info.device_name, info.device_uuid))) or info.device
