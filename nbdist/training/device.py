"""The torch device of this process, and whether it works."""

from __future__ import annotations

import torch

__all__ = ["context_error", "own_device"]


def own_device() -> torch.device:
    """The current GPU if torch can use one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def context_error() -> str | None:
    """The error of this process's CUDA context; None if it works or is not used.

    The error is permanent: each call of CUDA in this process raises it.
    """
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None
