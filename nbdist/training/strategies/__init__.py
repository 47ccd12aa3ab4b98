"""Strategies: how ranks train one model together. `nbdist.strategies` has the names."""

from __future__ import annotations

from nbdist.training.strategies.base import InputContext, Strategy
from nbdist.training.strategies.central_storage import CentralStorage
from nbdist.training.strategies.local_sgd import LocalSGD
from nbdist.training.strategies.mirrored import Mirrored, MultiWorkerMirrored
from nbdist.training.strategies.one_device import OneDevice
from nbdist.training.strategies.parameter_server import ParameterServer
from nbdist.training.strategies.tpu import TPU

__all__ = [
    "TPU",
    "CentralStorage",
    "InputContext",
    "LocalSGD",
    "Mirrored",
    "MultiWorkerMirrored",
    "OneDevice",
    "ParameterServer",
    "Strategy",
]
