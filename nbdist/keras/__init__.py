"""Keras 3 on all ranks, with the interface of horovod.keras.

Use `import nbdist.keras as hvd`. Keras must use its torch backend. Each name is loaded
at its first use. The names that this package defines need Keras, which the extra
`nbdist[keras]` installs. The other names, such as `init` and `rank`, are those of
`nbdist.horovod`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from nbdist import lazy

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "torch")

if TYPE_CHECKING:
    from nbdist.horovod import (
        Adasum as Adasum,
        Average as Average,
        Compression as Compression,
        Sum as Sum,
        allgather as allgather,
        allgather_object as allgather_object,
        allreduce as allreduce,
        barrier as barrier,
        broadcast as broadcast,
        broadcast_object as broadcast_object,
        init as init,
        is_initialized as is_initialized,
        local_rank as local_rank,
        local_size as local_size,
        rank as rank,
        run as run,
        shutdown as shutdown,
        size as size,
    )
    from nbdist.keras import callbacks as callbacks
    from nbdist.keras.optimizer import DistributedOptimizer as DistributedOptimizer
    from nbdist.keras.variables import (
        broadcast_global_variables as broadcast_global_variables,
    )
    from nbdist.keras.callbacks import (
        BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback as LearningRateScheduleCallback,
        LearningRateWarmupCallback as LearningRateWarmupCallback,
        MetricAverageCallback as MetricAverageCallback,
        ModelCheckpoint as ModelCheckpoint,
    )
else:
    _homes = {
        "nbdist.keras.optimizer": ("DistributedOptimizer",),
        "nbdist.keras.callbacks": (
            "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
            "LearningRateWarmupCallback", "MetricAverageCallback", "ModelCheckpoint",
        ),
        "nbdist.keras.variables": ("broadcast_global_variables",),
        "nbdist.keras": ("callbacks",),
        "nbdist.horovod": ("run",),
    }  # fmt: skip
    _on_ranks = {
        "nbdist.horovod": (
            "Adasum", "Average", "Compression", "Sum", "allgather", "allgather_object",
            "allreduce", "barrier", "broadcast", "broadcast_object", "init",
            "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size",
        ),
    }  # fmt: skip
    __getattr__, __dir__, __all__ = lazy.attach(__name__, _homes, _on_ranks)
