"""Keras 3 on all ranks: `import nbdist.keras as hvd`, after horovod.keras.

Keras computes with torch here. Names load on first use, and with the first of this
package's own Keras itself, which the extra `nbdist[keras]` installs; `init`, `rank` and
the others of Horovod's are those of `nbdist.horovod`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import nbdist.horovod

_HOMES = {
    "_optimizer": ("DistributedOptimizer",),
    "callbacks": (
        "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
        "LearningRateWarmupCallback", "MetricAverageCallback", "ModelCheckpoint",
    ),
    "_variables": ("broadcast_global_variables",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_HOROVODS = (
    "Adasum", "Average", "Compression", "Sum", "allgather", "allgather_object",
    "allreduce", "barrier", "broadcast", "broadcast_object", "init", "is_initialized",
    "local_rank", "local_size", "rank", "run", "shutdown", "size",
)  # fmt: skip

__all__ = sorted({*_HOME_OF, *_HOROVODS})

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "torch")


def __getattr__(name: str) -> Any:
    if name in _HOROVODS:
        return getattr(nbdist.horovod, name)
    home = _HOME_OF.get(name)
    if home is None:
        if name == "callbacks":
            return importlib.import_module(f"{__name__}.callbacks")
        raise AttributeError(f"module 'nbdist.keras' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "callbacks"})
