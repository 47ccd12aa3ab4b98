"""Horovod's names for PyTorch: `import nbdist.horovod as hvd`.

A script written for Horovod runs with this import in place of `import horovod.torch`,
in a cell, by `mpiexec -n 4 python train.py` and by `torchrun`. Names load on first use:
in the notebook only `hvd.run` does anything, and it needs neither torch nor MPI there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist import lazy

if TYPE_CHECKING:
    from nbdist.horovod import elastic as elastic
    from nbdist.horovod._allgather import (
        allgather as allgather,
        allgather_async as allgather_async,
        grouped_allgather as grouped_allgather,
        grouped_allgather_async as grouped_allgather_async,
    )
    from nbdist.horovod._allreduce import (
        allreduce as allreduce,
        allreduce_ as allreduce_,
        allreduce_async as allreduce_async,
        allreduce_async_ as allreduce_async_,
        grouped_allreduce as grouped_allreduce,
        grouped_allreduce_ as grouped_allreduce_,
        grouped_allreduce_async as grouped_allreduce_async,
        grouped_allreduce_async_ as grouped_allreduce_async_,
    )
    from nbdist.horovod._alltoall import (
        alltoall as alltoall,
        alltoall_async as alltoall_async,
    )
    from nbdist.horovod._broadcast import (
        broadcast as broadcast,
        broadcast_ as broadcast_,
        broadcast_async as broadcast_async,
        broadcast_async_ as broadcast_async_,
    )
    from nbdist.horovod._capabilities import (
        ccl_built as ccl_built,
        cuda_built as cuda_built,
        ddl_built as ddl_built,
        gloo_built as gloo_built,
        gloo_enabled as gloo_enabled,
        mpi_built as mpi_built,
        mpi_enabled as mpi_enabled,
        mpi_threads_supported as mpi_threads_supported,
        nccl_built as nccl_built,
        rocm_built as rocm_built,
    )
    from nbdist.horovod._compression import Compression as Compression
    from nbdist.horovod._handles import (
        poll as poll,
        synchronize as synchronize,
    )
    from nbdist.horovod._join import (
        barrier as barrier,
        join as join,
    )
    from nbdist.horovod._launch import run as run
    from nbdist.horovod._optimizer import DistributedOptimizer as DistributedOptimizer
    from nbdist.horovod._process_sets import (
        ProcessSet as ProcessSet,
        add_process_set as add_process_set,
        get_process_set_ids_and_ranks as get_process_set_ids_and_ranks,
        global_process_set as global_process_set,
        remove_process_set as remove_process_set,
    )
    from nbdist.horovod._reduce_ops import (
        Adasum as Adasum,
        Average as Average,
        Max as Max,
        Min as Min,
        Product as Product,
        Sum as Sum,
    )
    from nbdist.horovod._reducescatter import (
        grouped_reducescatter as grouped_reducescatter,
        grouped_reducescatter_async as grouped_reducescatter_async,
        reducescatter as reducescatter,
        reducescatter_async as reducescatter_async,
    )
    from nbdist.horovod._state import (
        allgather_object as allgather_object,
        broadcast_object as broadcast_object,
        broadcast_object_fn as broadcast_object_fn,
        broadcast_optimizer_state as broadcast_optimizer_state,
        broadcast_parameters as broadcast_parameters,
    )
    from nbdist.horovod._sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from nbdist.horovod._world import (
        cross_rank as cross_rank,
        cross_size as cross_size,
        init as init,
        is_homogeneous as is_homogeneous,
        is_initialized as is_initialized,
        local_rank as local_rank,
        local_size as local_size,
        rank as rank,
        shutdown as shutdown,
        size as size,
    )
else:
    _homes = {
        "nbdist.horovod._launch": ("run",),
    }  # fmt: skip
    _on_ranks = {
        "nbdist.horovod._world": (
            "cross_rank", "cross_size", "init", "is_homogeneous", "is_initialized",
            "local_rank", "local_size", "rank", "shutdown", "size",
        ),
        "nbdist.horovod._capabilities": (
            "ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled",
            "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
            "rocm_built",
        ),
        "nbdist.horovod._reduce_ops": (
            "Adasum", "Average", "Max", "Min", "Product", "Sum",
        ),
        "nbdist.horovod._compression": ("Compression",),
        "nbdist.horovod._process_sets": (
            "ProcessSet", "add_process_set", "get_process_set_ids_and_ranks",
            "global_process_set", "remove_process_set",
        ),
        "nbdist.horovod._handles": ("poll", "synchronize"),
        "nbdist.horovod._allreduce": (
            "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
            "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
            "grouped_allreduce_async_",
        ),
        "nbdist.horovod._allgather": (
            "allgather", "allgather_async", "grouped_allgather",
            "grouped_allgather_async",
        ),
        "nbdist.horovod._broadcast": (
            "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
        ),
        "nbdist.horovod._alltoall": ("alltoall", "alltoall_async"),
        "nbdist.horovod._reducescatter": (
            "grouped_reducescatter", "grouped_reducescatter_async", "reducescatter",
            "reducescatter_async",
        ),
        "nbdist.horovod._join": ("barrier", "join"),
        "nbdist.horovod._sync_batch_norm": ("SyncBatchNorm",),
        "nbdist.horovod._optimizer": ("DistributedOptimizer",),
        "nbdist.horovod._state": (
            "allgather_object", "broadcast_object", "broadcast_object_fn",
            "broadcast_optimizer_state", "broadcast_parameters",
        ),
        "nbdist.horovod": ("elastic",),
    }  # fmt: skip
    __getattr__, __dir__, __all__ = lazy.attach(__name__, _homes, _on_ranks)
