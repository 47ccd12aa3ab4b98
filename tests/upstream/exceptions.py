"""The upstream cases that fail on nbdist, each with its reason.

A case that fails on gloo too need not be here. A case of this list that passes is an
error, so that the list stays true.
"""

from __future__ import annotations

__all__ = [
    "HOROVOD",
    "HOROVOD_ON_ONE",
    "HOROVOD_ON_SEVERAL",
    "HOROVOD_RACES",
    "PYTORCH",
]

_GROUP = "ProcessGroupWithDispatchedCollectivesTests"
_DDP = "DistributedDataParallelTest"
_WRAPPER = "ProcessGroupGlooWrapperTest"
_LATER = "expects the error of a mismatch before the work's wait(), which raises ours"
_NAME = "compares the backend's name with gloo's"
_DEVICE = "makes a device of gloo's"
_STRIDED = "expects an error for strided tensors, which nbdist takes"

PYTORCH: dict[str, dict[str, str]] = {
    "test_c10d_gloo.py": {
        "ProcessGroupGlooTest.test_allreduce_coalesced_async": "has one tensor twice "
        "in a list; nbdist reduces it twice",
        f"{_DDP}.test_gloo_backend_cpu_module": _DEVICE,
        f"{_DDP}.test_gloo_backend_cpu_module_grad_is_view": _DEVICE,
        "CommTest.test_broadcast_coalesced_gloo_cpu": _DEVICE,
        f"Gloo{_GROUP}.test_all_to_all_single": _STRIDED,
        f"Gloo{_GROUP}.test_init_process_group_for_all_backends": _NAME,
    },
    "test_pg_wrapper.py": {
        f"{_WRAPPER}.test_collective_shape_mismatch_debug_mode": _LATER,
        f"{_WRAPPER}.test_collectives_op_mismatch_debug_mode": _LATER,
    },
    "test_c10d_common.py": {
        f"{_GROUP}.test_init_process_group_for_all_backends": _NAME,
    },
}
"""Reasons by file and case, for `pytorch`."""

HOROVOD: dict[str, dict[str, str]] = {
    "parallel/test_torch.py": {
        "TorchTests.test_broadcast_state_no_grad": "reads the zero gradients that "
        "Horovod's broadcast_optimizer_state leaves; nbdist's changes none",
    },
}
"""Reasons by file and case, for `horovod`, on any number of ranks."""

HOROVOD_ON_ONE: dict[str, dict[str, str]] = {
    "parallel/test_torch.py": {
        f"TorchTests.test_horovod_{each}_process_sets": "is of several ranks: the set "
        "of the even ranks is that of all, which Horovod refuses too"
        for each in (
            "allgather", "allgather_grad", "allreduce", "allreduce_grad",
            "grouped_allgather", "grouped_allreduce", "grouped_allreduce_grad",
            "grouped_reducescatter", "reducescatter", "reducescatter_grad",
        )
    }
    | {
        "TorchTests.test_horovod_join_allreduce": "is of several ranks: the last rank "
        "that joins is not the first",
    },
}  # fmt: skip
"""Further reasons, on one rank."""

HOROVOD_ON_SEVERAL: dict[str, dict[str, str]] = {
    "single/test_torch_elastic.py": {
        "TorchElasticTests.test_elastic_sampler": "is of one rank: record_batch counts "
        "the batches of all ranks, in Horovod too",
    },
}
"""Further reasons, on several ranks."""

HOROVOD_RACES: dict[str, dict[str, str]] = {
    "parallel/test_torch.py": {
        f"TorchTests.test_horovod_{each}_duplicate_name_error": "expects that a call "
        "is still under way when the next one begins, which can have ended in nbdist"
        for each in ("allgather", "allreduce", "broadcast", "reducescatter")
    }
    | {
        f"TorchTests.test_{each}_barrier_op": "expects a wait of at least 5 s for a "
        "rank that sleeps 5 s, which can have begun to sleep a little earlier"
        for each in ("global", "process_set")
    },
}
"""Cases that pass or fail, by file, each with its reason."""
