"""Parameter servers: some ranks hold the parameters, the other ranks train."""

from __future__ import annotations

from nbdist.training.strategies.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer"]
