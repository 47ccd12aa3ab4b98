"""Horovod's names for PyTorch: `import nbdist.horovod as hvd`.

A script written for Horovod runs with this import in place of `import horovod.torch`:
in a cell, under `mpiexec -n 4 python train.py` and under `torchrun`. Each name is
loaded at its first use. In the notebook's process only `hvd.run` works. It needs
neither torch nor MPI there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist import lazy

if TYPE_CHECKING:
    from nbdist.horovod import elastic as elastic
    from nbdist.horovod.basics import (
        ccl_built as ccl_built,
        cross_rank as cross_rank,
        cross_size as cross_size,
        cuda_built as cuda_built,
        ddl_built as ddl_built,
        gloo_built as gloo_built,
        gloo_enabled as gloo_enabled,
        init as init,
        is_homogeneous as is_homogeneous,
        is_initialized as is_initialized,
        local_rank as local_rank,
        local_size as local_size,
        mpi_built as mpi_built,
        mpi_enabled as mpi_enabled,
        mpi_threads_supported as mpi_threads_supported,
        nccl_built as nccl_built,
        rank as rank,
        rocm_built as rocm_built,
        shutdown as shutdown,
        size as size,
        start_timeline as start_timeline,
        stop_timeline as stop_timeline,
    )
    from nbdist.horovod.ops.allgather import (
        allgather as allgather,
        allgather_async as allgather_async,
        grouped_allgather as grouped_allgather,
        grouped_allgather_async as grouped_allgather_async,
    )
    from nbdist.horovod.ops.allreduce import (
        allreduce as allreduce,
        allreduce_ as allreduce_,
        allreduce_async as allreduce_async,
        allreduce_async_ as allreduce_async_,
        grouped_allreduce as grouped_allreduce,
        grouped_allreduce_ as grouped_allreduce_,
        grouped_allreduce_async as grouped_allreduce_async,
        grouped_allreduce_async_ as grouped_allreduce_async_,
    )
    from nbdist.horovod.ops.alltoall import (
        alltoall as alltoall,
        alltoall_async as alltoall_async,
    )
    from nbdist.horovod.ops.broadcast import (
        broadcast as broadcast,
        broadcast_ as broadcast_,
        broadcast_async as broadcast_async,
        broadcast_async_ as broadcast_async_,
    )
    from nbdist.horovod.compression import Compression as Compression
    from nbdist.horovod.handles import (
        poll as poll,
        synchronize as synchronize,
    )
    from nbdist.horovod.ops.join import (
        barrier as barrier,
        join as join,
    )
    from nbdist.horovod.ops.sparse_allreduce import (
        sparse_allreduce_async as sparse_allreduce_async,
    )
    from nbdist.horovod.exceptions import (
        HorovodInternalError as HorovodInternalError,
        HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    )
    from nbdist.horovod.launch import run as run
    from nbdist.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
    from nbdist.horovod.process_sets import (
        ProcessSet as ProcessSet,
        add_process_set as add_process_set,
        get_process_set_ids_and_ranks as get_process_set_ids_and_ranks,
        global_process_set as global_process_set,
        remove_process_set as remove_process_set,
    )
    from nbdist.horovod.reduce_ops import (
        Adasum as Adasum,
        Average as Average,
        Max as Max,
        Min as Min,
        Product as Product,
        Sum as Sum,
    )
    from nbdist.horovod.ops.reducescatter import (
        grouped_reducescatter as grouped_reducescatter,
        grouped_reducescatter_async as grouped_reducescatter_async,
        reducescatter as reducescatter,
        reducescatter_async as reducescatter_async,
    )
    from nbdist.horovod.functions import (
        allgather_object as allgather_object,
        broadcast_object as broadcast_object,
        broadcast_object_fn as broadcast_object_fn,
        broadcast_optimizer_state as broadcast_optimizer_state,
        broadcast_parameters as broadcast_parameters,
    )
    from nbdist.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
else:
    _homes = {
        "nbdist.horovod.launch": ("run",),
    }  # fmt: skip
    _on_ranks = {
        "nbdist.horovod.basics": (
            "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built",
            "gloo_built", "gloo_enabled", "init", "is_homogeneous", "is_initialized",
            "local_rank", "local_size", "mpi_built", "mpi_enabled",
            "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown",
            "size", "start_timeline", "stop_timeline",
        ),
        "nbdist.horovod.reduce_ops": (
            "Adasum", "Average", "Max", "Min", "Product", "Sum",
        ),
        "nbdist.horovod.compression": ("Compression",),
        "nbdist.horovod.process_sets": (
            "ProcessSet", "add_process_set", "get_process_set_ids_and_ranks",
            "global_process_set", "remove_process_set",
        ),
        "nbdist.horovod.handles": ("poll", "synchronize"),
        "nbdist.horovod.ops.allreduce": (
            "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
            "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
            "grouped_allreduce_async_",
        ),
        "nbdist.horovod.ops.allgather": (
            "allgather", "allgather_async", "grouped_allgather",
            "grouped_allgather_async",
        ),
        "nbdist.horovod.ops.broadcast": (
            "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
        ),
        "nbdist.horovod.ops.alltoall": ("alltoall", "alltoall_async"),
        "nbdist.horovod.ops.reducescatter": (
            "grouped_reducescatter", "grouped_reducescatter_async", "reducescatter",
            "reducescatter_async",
        ),
        "nbdist.horovod.ops.join": ("barrier", "join"),
        "nbdist.horovod.ops.sparse_allreduce": ("sparse_allreduce_async",),
        "nbdist.horovod.exceptions": (
            "HorovodInternalError", "HostsUpdatedInterrupt",
        ),
        "nbdist.horovod.sync_batch_norm": ("SyncBatchNorm",),
        "nbdist.horovod.optimizer": ("DistributedOptimizer",),
        "nbdist.horovod.functions": (
            "allgather_object", "broadcast_object", "broadcast_object_fn",
            "broadcast_optimizer_state", "broadcast_parameters",
        ),
        "nbdist.horovod": ("elastic",),
    }  # fmt: skip
    __getattr__, __dir__, __all__ = lazy.attach(__name__, _homes, _on_ranks)
