"""torch's autograd functions, for type checkers: torch leaves `apply` untyped."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["apply"]


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """What `function.apply(*args)` returns."""
    return function.apply(*args)
