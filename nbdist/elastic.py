"""Elastic training: it survives the death of a rank."""

from __future__ import annotations

from nbdist.training.data.sampler import Sampler
from nbdist.training.elastic.run import run
from nbdist.training.elastic.state import State

__all__ = ["Sampler", "State", "run"]
