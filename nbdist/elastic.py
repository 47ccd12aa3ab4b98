"""Training that outlives its ranks: `nbdist.elastic`, or `import nbdist.elastic`."""

from __future__ import annotations

from nbdist.training.elastic import Sampler, State, run

__all__ = ["Sampler", "State", "run"]
