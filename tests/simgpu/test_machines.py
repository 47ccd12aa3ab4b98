"""nbdist on simulated machines that differ from the usual one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ranks import failures, launch

from nbdist import CellError, Cluster
from nbdist.clusters.hosts.machine import this_host
from nbdist.errors import UsageError
from tests.gpu_marks import needs_gpus, simulated

CASES_FILE = str(Path(__file__).with_name("machine_cases.py"))
ORDERS = ["work_queued_before_and_after_is_ordered", "a_stream_of_the_users",
          "calls_on_many_streams", "groups_are_closed_while_others_read"]  # fmt: skip
MACHINES = {
    "usual": ({}, "CUDA IPC"),
    "events that cannot be opened": ({"SIMGPU_NO_EVENT_OPEN": "1"}, "CUDA IPC"),
    "events that cannot be shared": ({"SIMGPU_NO_EVENT_IPC": "1"}, "staged"),
    "events that lie": ({"SIMGPU_EVENTS_LIE": "1"}, "CUDA IPC"),
    "memory that reads other data": ({"SIMGPU_IPC_STALE": "1"}, "staged"),
    "memory that cannot be shared": ({"SIMGPU_NO_IPC": "1"}, "staged"),
    "memory that cannot be opened": ({"SIMGPU_NO_OPEN": "1"}, "staged"),
}
"""The simulator's variables, and the transport that the ranks choose."""
LATE = {"SIMGPU_JITTER_US": "500", "SIMGPU_HOST_PAUSE_US": "3000"}
"""Operations are sometimes late by up to 15 ms, and hosts by 3 ms."""
NO_PERMISSION, NOT_SUPPORTED, FUNCTION_NOT_FOUND, GPU_IS_LOST = 4, 3, 13, 15
NVML_ERRORS = NO_PERMISSION, NOT_SUPPORTED, FUNCTION_NOT_FOUND, GPU_IS_LOST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    simulated,
]
needs_two = needs_gpus(2)


@pytest.mark.streams
@pytest.mark.parametrize("machine", MACHINES)
def test_machine(machine: str) -> None:
    environment, words = MACHINES[machine]
    found = launch(
        2, CASES_FILE, "on_machine", ORDERS, "auto",
        deadline_s=200, environment=environment,
    )  # fmt: skip
    for text, _ in found:
        assert re.search(rf"{words}.* \(CUDA\)", text), text
    outcomes = [each for _, each in found]
    for case in ORDERS:
        assert not failures(outcomes, case), failures(outcomes, case)


@pytest.mark.streams
@pytest.mark.parametrize(
    "case",
    ["many_small_pieces", "late_messages", "messages_on_two_streams",
     "batches_are_complete", "batches_stay_as_they_are",
     "results_outlive_an_aborted_group"],
)  # fmt: skip
def test_case(case: str) -> None:
    launch(2, CASES_FILE, "run", case, False, deadline_s=100, environment=LATE)


@pytest.mark.streams
@pytest.mark.parametrize("machine", ["usual", "events that cannot be opened"])
def test_calls_on_changing_streams(machine: str) -> None:
    environment = {**MACHINES[machine][0], **LATE}
    arguments = ("calls_on_changing_streams", False)
    launch(2, CASES_FILE, "run", *arguments, deadline_s=100, environment=environment)


@pytest.mark.streams
@needs_two
@pytest.mark.parametrize(
    "case", ["another_current_device", "a_step_does_not_wait_for_the_next_batch"]
)
def test_case_on_two_gpus(case: str) -> None:
    launch(2, CASES_FILE, "run", case, True, deadline_s=100)


@needs_two
@pytest.mark.parametrize("work", ["unfinished", "finished"])
def test_nccl_closes_without_the_other_rank(work: str) -> None:
    launch(2, CASES_FILE, "nccl_closes_alone", work, deadline_s=100)


@needs_two
def test_unfinished_work_of_nccl_is_aborted_on_all_ranks() -> None:
    for ended in launch(2, CASES_FILE, "nccl_is_aborted_together", deadline_s=100):
        assert ended[0] == "abort"


@needs_two
def test_a_rank_closes_nccl_after_the_rank_that_made_its_store(tmp_path: Path) -> None:
    found = launch(
        2, CASES_FILE, "nccl_store_outlives_its_maker", deadline_s=100,
        environment={"TMPDIR": str(tmp_path), "TORCH_NCCL_ENABLE_MONITORING": "1"},
    )  # fmt: skip
    assert found == [True, True]
    assert not list(tmp_path.glob("nbdist-nccl-*"))


def test_an_error_of_a_kernel_is_sticky_and_its_ranks_own() -> None:
    failed, sound = launch(2, CASES_FILE, "broken_context")
    assert "device-side assert triggered" in failed
    assert sound == "True"


def test_ranks_share_the_memory_of_a_gpu(tmp_path: Path) -> None:
    machine = {"SIMGPU_MEM_MB": "1024", "SIMGPU_STATE": str(tmp_path / "ledger")}
    found = launch(2, CASES_FILE, "too_much_memory", environment=machine)
    assert all(free.endswith("of 1024 MiB") for free, _ in found)
    assert all("CUDA out of memory" in text for _, text in found)


@pytest.mark.parametrize("takes_mig", [True, False], ids=["NCCL", "no NCCL"])
def test_a_rank_has_a_mig_device_of_its_own(
    takes_mig: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where NCCL refuses MIG devices of one GPU, nbdist serves them."""
    monkeypatch.setenv("SIMGPU_MIG", "2")
    monkeypatch.setenv("SIMGPU_NCCL_NO_MIG", "0" if takes_mig else "1")
    monkeypatch.setenv("SIMGPU_STATE", str(tmp_path / "ledger"))
    with Cluster(2, device="cuda", threads=1) as cluster:
        cluster.execute(
            "x = torch.full((3,), rank + 1.0, device=device); nbdist.all_reduce(x)"
        )
        assert [x.tolist() for x in cluster["x.cpu()"]] == [[3.0] * 3] * 2
        assert cluster["torch.cuda.device_count()"] == [1, 1]
        names = cluster["str(torch.cuda.get_device_properties(0).uuid)"]
        assert len(set(names)) == 2
        cluster.execute(
            "from torch.nn.parallel import DistributedDataParallel\n"
            "model = DistributedDataParallel(torch.nn.Linear(3, 3).to(device))\n"
            "model(x[None] + rank).sum().backward()\n"
            "gradient = model.module.weight.grad.cpu()",
            timeout_s=100,
        )
        first, second = cluster["gradient"]
        assert torch.equal(first, torch.full((3, 3), 3.5))
        assert torch.equal(first, second)
        backends = cluster["dist.get_backend_config()"]
        assert all(("cuda:nccl" in each) == takes_mig for each in backends)
        cluster.execute("if rank == 0: dist.send(x, 1)\nelse: dist.recv(x, 0)")
        with pytest.raises(CellError):
            cluster.execute("if rank == 1: import os; os.kill(os.getpid(), 9)")
        cluster.execute("dist.all_reduce(torch.ones(3, device=device))", timeout_s=100)


def own_tensor() -> torch.Tensor:
    return torch.ones(3, device="cuda")


EXCLUSIVE = "3"
CALLS = """
import time
x = torch.full((3,), rank + 1.0, device=device)
nbdist.log(loss=x.sum())
handle = nbdist.all_reduce(x, async_op=True)
handle.wait()
time.sleep(1.5)  # the sampler reads the times of the calls
"""


@needs_two
def test_a_gpu_for_each_rank_may_be_exclusive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No rank, and not the notebook, makes a context on the GPU of another."""
    monkeypatch.setenv("SIMGPU_COMPUTE_MODE", EXCLUSIVE)
    monkeypatch.setenv("SIMGPU_STATE", str(tmp_path / "ledger"))
    before = torch.cuda.is_initialized()  # by an earlier test
    with Cluster(2, device="cuda", threads=1) as cluster:
        cluster.execute(CALLS)
        assert cluster["x.tolist()"] == [[3.0] * 3] * 2
        cluster.execute(CALLS)
        assert [each.tolist() for each in cluster["x"]] == [[3.0] * 3] * 2
        assert cluster.run(own_tensor)[1].device.type == "cpu"
        assert torch.cuda.is_initialized() == before


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        (EXCLUSIVE, {"ranks_per_gpu": 2}, "2 ranks would use it.*nvidia-smi -c 0"),
        ("2", {"n": 1}, "'prohibited', and 1 rank would use it.*nvidia-smi -c 0"),
    ],
)
def test_more_ranks_than_the_compute_mode_permits_are_refused(
    mode: str,
    options: dict[str, int],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SIMGPU_COMPUTE_MODE", mode)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with pytest.raises(UsageError, match=words):
        Cluster(device="cuda", **options)


def test_a_gpu_that_is_named_twice_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(UsageError, match=r"'0,0' names GPU-.* twice"):
        Cluster(2, device="cuda")


def faulty(patch: pytest.MonkeyPatch, function: str, error: int) -> None:
    """Have a function of NVML fail for the first of two MIG devices, or its card."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        patch.delenv(name, raising=False)
    patch.setenv("SIMGPU_MIG", "2")
    patch.setenv("SIMGPU_NVML_ERROR", f"nvmlDeviceGet{function}={error}")


@pytest.mark.parametrize("error", NVML_ERRORS)
@pytest.mark.parametrize("function", ["MigDeviceHandleByIndex", "UUID"])
def test_a_mig_device_that_nvml_does_not_name_is_left_out(
    function: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, function, error)
    mig = [gpu for gpu in this_host().gpus if gpu.is_mig]
    assert len(mig) == 1
    assert mig[0].memory is not None


@pytest.mark.parametrize("error", NVML_ERRORS)
def test_a_mig_device_without_a_known_model_is_used(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, "Name", error)
    names = [gpu.name for gpu in this_host().gpus if gpu.is_mig]
    assert names == ([] if error == GPU_IS_LOST else ["GPU 0", "GPU 0"])


@pytest.mark.parametrize("error", NVML_ERRORS)
def test_a_mig_device_with_unknown_memory_is_used(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, "MemoryInfo", error)
    known = [gpu.memory is not None for gpu in this_host().gpus if gpu.is_mig]
    assert known == ([True] if error == GPU_IS_LOST else [False, True])


@pytest.mark.parametrize(
    ("function", "error"),
    [("MigDeviceHandleByIndex", NO_PERMISSION), ("UUID", GPU_IS_LOST),
     ("Name", FUNCTION_NOT_FOUND), ("MemoryInfo", NOT_SUPPORTED)],
)  # fmt: skip
def test_a_start_survives_errors_of_nvml(
    function: str, error: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faulty(monkeypatch, function, error)
    monkeypatch.setenv("SIMGPU_STATE", str(tmp_path / "ledger"))
    with Cluster(1, device="cuda", ranks_per_gpu=2, threads=1) as cluster:
        cluster.execute("x = torch.ones(3, device=device).sum().item()")
        assert cluster["x"] == [3.0]
        (mine,) = cluster.ranks
        assert str(mine.device_uuid).startswith("MIG-")
