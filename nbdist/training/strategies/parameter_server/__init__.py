"""Parameter servers: some ranks hold the parameters, the others train with them."""

from __future__ import annotations

from .strategy import ParameterServer

__all__ = ["ParameterServer"]
