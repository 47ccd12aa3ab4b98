"""Ways in which ranks train one model together; public as `nbdist.strategies`."""

from __future__ import annotations

from .base import Strategy
from .central_storage import CentralStorage
from .local_sgd import LocalSGD
from .mirrored import Mirrored
from .parameter_server import ParameterServer

__all__ = ["CentralStorage", "LocalSGD", "Mirrored", "ParameterServer", "Strategy"]
