"""Strategies: how ranks train one model together."""

from __future__ import annotations

from nbdist.training.strategies import (
    TPU,
    CentralStorage,
    LocalSGD,
    Mirrored,
    ParameterServer,
    Strategy,
)

__all__ = [
    "TPU",
    "CentralStorage",
    "LocalSGD",
    "Mirrored",
    "ParameterServer",
    "Strategy",
]
