"""The torch device of this process."""

from __future__ import annotations

import torch

__all__ = ["own_device"]


def own_device() -> torch.device:
    """The current GPU if torch can use one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
