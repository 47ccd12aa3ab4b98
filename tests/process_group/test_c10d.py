"""PyTorch's own cases for backends of torch.distributed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ranks import launch

CASES = str(Path(__file__).with_name("c10d_cases.py"))
NOT_APPLICABLE = {
    "cuda|nccl|gpu|mixed_backend|no_sync": "needs a GPU for each rank, and NCCL",
    "op_err|new_subgroups_with_group_param": "assumes a GPU for each rank",
    "SyncBatchNorm": "needs torchvision, or GPUs: SyncBatchNorm takes no CPU tensors",
    "barrier_timeout": "expects the words of gloo's error; ours is CollectiveTimeout",
    "monitored_barrier": "torch refuses it on every backend but gloo; a barrier with a "
    "time-out says here who is missing",
    "sparse_all_reduce": "sparse tensors are refused",
}
LEAST_PASSED = 110


def test_pytorchs_cases_pass() -> None:
    outcomes = launch(3, CASES, "run_cases", NOT_APPLICABLE, deadline_s=150)
    failed = [
        f"{case}, rank {rank}: {why}"
        for rank, by_case in enumerate(outcomes)
        for case, (outcome, why) in by_case.items()
        if outcome == "failed"
    ]
    assert not failed, "\n".join(failed)
    counts = Counter(outcome for outcome, _ in outcomes[0].values())
    assert counts["passed"] >= LEAST_PASSED, counts
