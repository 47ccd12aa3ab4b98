"""Collectives of CUDA tensors, over every transport that the machine's GPUs allow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ranks import RanksFailed, assert_clean, failures, launch, once

from tests.gpu_marks import GPUS, needs_gpus

CONTRACT = str(Path(__file__).with_name("contract.py"))
CASES_FILE = str(Path(__file__).with_name("gpu.py"))
FAULTS = str(Path(__file__).with_name("faults.py"))
CASES = [
    "work_queued_before_and_after_is_ordered",
    "a_stream_of_the_users",
    "calls_on_many_streams",
    "asynchronous_calls",
    "memory_is_not_reused_too_early",
    "calls_for_both_kinds_of_device_alternate",
    "long_runs_of_small_calls",
    "a_wait_for_a_busy_device_can_be_released",
    "groups_are_closed_while_others_read",
    "groups_release_their_memory",
]
RELEASED = "a_wait_for_a_busy_device_can_be_released"
ON_ONE = [
    (2, "ipc"), (3, "ipc"), (4, "ipc"), (5, "ipc"),
    (2, "staged"), (3, "staged"), (3, "mpi"),
]  # fmt: skip
SAME_STREAMS = [(1, "auto"), (2, "auto"), (2, "shared"), (2, "mpi"), (2, "ring")]
"""Transports whose copies and events are those of a transport in `ON_ONE`."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_two = needs_gpus(2)


def contract_holds(size: int, transports: list[str], own_gpus: bool = False) -> None:
    arguments = (transports, "cuda", own_gpus)
    results = launch(size, CONTRACT, "run_on_transports", *arguments, deadline_s=350)
    for transport in transports:
        assert_clean(results[0][transport], transport)


@once
def outcomes(
    size: int, transport: str, own_gpus: bool = False
) -> list[dict[str, str | None]]:
    """Run all cases in one launch; the results of each rank."""
    # The host does not wait for NCCL: it has no wait to be let out of.
    cases = [case for case in CASES if transport != "nccl" or case != RELEASED]
    arguments = (transport, cases, own_gpus)
    return launch(size, CASES_FILE, "run_cases", *arguments, deadline_s=300)


def case_holds(size: int, transport: str, case: str, own_gpus: bool = False) -> None:
    found = failures(outcomes(size, transport, own_gpus), case)
    assert not found, found


# -- ranks that share a GPU ------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "transport"),
    [*(pytest.param(*each, marks=pytest.mark.streams) for each in ON_ONE),
     *SAME_STREAMS],
)  # fmt: skip
def test_contract_on_a_shared_gpu(size: int, transport: str) -> None:
    contract_holds(size, [transport])


@pytest.mark.streams
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", ["ipc", "staged"])
def test_case_on_a_shared_gpu(transport: str, case: str) -> None:
    case_holds(3, transport, case)


@pytest.mark.parametrize("transport", ["ipc", "staged"])
@pytest.mark.parametrize("body", ["abort", "interrupt"])
def test_every_wait_can_be_released(transport: str, body: str) -> None:
    calls = [(body, (transport,))]
    for (outcome,) in launch(3, FAULTS, "run_functions", calls, "cuda", deadline_s=200):
        assert not isinstance(outcome, Exception), outcome


def test_a_killed_rank_ends_a_plain_mpiexec() -> None:
    with pytest.raises(RanksFailed, match="rank 1: died"):
        launch(2, FAULTS, "die", "cuda")


def test_memory_that_a_rank_cannot_open_is_released() -> None:
    launch(3, CASES_FILE, "memory_that_a_rank_cannot_open")


@pytest.mark.parametrize("answer", [True, False])
def test_events_that_lie_are_not_used(answer: bool) -> None:
    launch(3, CASES_FILE, "events_that_lie", answer)


@pytest.mark.parametrize(
    ("transport", "words"),
    [("auto", r"CUDA IPC \(CUDA\)"), ("staged", r"staged .* \(CUDA\)")],
)
def test_the_description_of_a_group_names_its_transport(
    transport: str, words: str
) -> None:
    for text in launch(2, CASES_FILE, "described", transport):
        assert re.search(words, text), text


def test_a_cuda_aware_mpi_is_used_if_there_is_one() -> None:
    (text, *_) = launch(2, CASES_FILE, "described", "mpi")
    if "CUDA-aware MPI (messages)" not in text:
        pytest.skip("this MPI takes no device memory")
    assert "CUDA-aware MPI (CUDA)" in text


# -- NCCL, and GPUs that read each other -----------------------------------------------


@pytest.mark.streams
@pytest.mark.skipif(
    not torch.distributed.is_nccl_available(), reason="this torch has no NCCL"
)
def test_nccl_in_a_world_of_one() -> None:
    launch(1, CASES_FILE, "nccl_alone")


@needs_two
@pytest.mark.parametrize(
    "transport",
    ["auto",  # is NCCL
     *(pytest.param(name, marks=pytest.mark.streams)
       for name in ("nccl", "ipc", "staged", "mpi"))],
)  # fmt: skip
@pytest.mark.parametrize(
    "size", [*(pytest.param(n, marks=pytest.mark.gpus(n)) for n in (2, 4)), 3, 8]
)
def test_contract_on_gpus_of_their_own(size: int, transport: str) -> None:
    if size > GPUS:
        pytest.skip(f"needs {size} CUDA GPUs")
    contract_holds(size, [transport], own_gpus=True)


@pytest.mark.streams
@needs_two
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", ["nccl", "ipc", "staged"])
def test_case_on_gpus_of_their_own(transport: str, case: str) -> None:
    if transport == "nccl" and case == "a_wait_for_a_busy_device_can_be_released":
        pytest.skip("the host does not wait for NCCL, so there is no wait to release")
    case_holds(2, transport, case, own_gpus=True)
