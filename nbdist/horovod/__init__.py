"""Horovod's names for PyTorch: `import nbdist.horovod as hvd`.

A script written for Horovod runs with this import in place of `import horovod.torch`,
in a cell, by `mpiexec -n 4 python train.py` and by `torchrun`. Names load on first use:
in the notebook only `hvd.run` does anything, and it needs neither torch nor MPI there.
"""

from __future__ import annotations

import importlib
from typing import Any

import nbdist

_HOMES = {
    "_launch": ("run",),
    "_world": (
        "cross_rank", "cross_size", "init", "is_homogeneous", "is_initialized",
        "local_rank", "local_size", "rank", "shutdown", "size",
    ),
    "_capabilities": (
        "ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled",
        "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rocm_built",
    ),
    "_reduce_ops": ("Adasum", "Average", "Max", "Min", "Product", "Sum"),
    "_compression": ("Compression",),
    "_process_sets": (
        "ProcessSet", "add_process_set", "get_process_set_ids_and_ranks",
        "global_process_set", "remove_process_set",
    ),
    "_handles": ("poll", "synchronize"),
    "_allreduce": (
        "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
        "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
        "grouped_allreduce_async_",
    ),
    "_allgather": (
        "allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async",
    ),
    "_broadcast": ("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
    "_alltoall": ("alltoall", "alltoall_async"),
    "_reducescatter": (
        "grouped_reducescatter", "grouped_reducescatter_async", "reducescatter",
        "reducescatter_async",
    ),
    "_join": ("barrier", "join"),
    "_sync_batch_norm": ("SyncBatchNorm",),
    "_optimizer": ("DistributedOptimizer",),
    "_state": (
        "allgather_object", "broadcast_object", "broadcast_object_fn",
        "broadcast_optimizer_state", "broadcast_parameters",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module(f"{__name__}.elastic")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'nbdist.horovod' has no attribute {name!r}")
    if nbdist._in_notebook and home != "_launch":
        return nbdist._only_on_a_rank(f"horovod.{name}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, "elastic"})
