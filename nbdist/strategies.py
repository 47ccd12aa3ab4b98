"""Strategies: how ranks train one model together."""

from __future__ import annotations

from nbdist.training.strategies import (
    TPU,
    CentralStorage,
    InputContext,
    LocalSGD,
    Mirrored,
    MultiWorkerMirrored,
    OneDevice,
    ParameterServer,
    Strategy,
)

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
