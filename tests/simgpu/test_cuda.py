"""The simulated CUDA behaves as CUDA's documentation says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import FORKED_RANK, IS_FORKING, forking

from tests.gpu_marks import simulated

CASES_FILE = str(Path(__file__).with_name("cuda_cases.py"))
Program = list[str]
"""The command line that runs a case, without the case's name."""
ASSERTION = "CUDA error: device-side assert triggered"
EXPECTED = {
    "streams_are_not_ordered": "True",
    "events_order_streams": "True",
    "a_wait_is_for_the_record_before_it": "True",
    "a_launch_does_not_wait": "True",
    "a_pinned_copy_does_not_wait": "True",
    "new_memory_is_not_zero": "True",
    "an_assertion_is_sticky": ASSERTION,
    "a_broken_context_drops_its_work": "refused",
    "an_exit_drops_the_queued_work": "True",
    "a_forked_child_cannot_use_cuda": "3",  # cudaErrorInitializationError
    "lists_are_copied_to_the_host": "True",
    "mixed_devices_are_refused": "Expected all tensors to be on the same device",
    "sparse_tensors": "True",
    "segments_grow_without_a_warning": "True",
    "a_graph_repeats_its_work": "True",
    "a_call_of_another_thread_invalidates_a_capture": "5 lost, True {'kept'}",
    "a_captured_event_cannot_be_waited_for": (
        "CUDA error: operation not permitted on an event last recorded in a capturing "
        "stream; CUDA error: operation not permitted when stream is capturing"
    ),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(1),
    pytest.mark.timeout(120),
    simulated,
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    if not IS_FORKING:
        yield [sys.executable, CASES_FILE]
        return
    with forking(tmp_path_factory.mktemp("forks")) as socket:
        module = "tests.simgpu.cuda_cases"
        yield [sys.executable, "-S", str(FORKED_RANK), str(socket), module]


def run(
    program: Program, case: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program, case],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def printed(program: Program, case: str, **environment: str) -> str:
    done = run(program, case, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("case", EXPECTED)
def test_case(program: Program, case: str) -> None:
    assert printed(program, case) == EXPECTED[case]


def test_the_host_cannot_read_device_memory(program: Program) -> None:
    done = run(program, "the_host_cannot_read_device_memory")
    assert done.stdout.strip() == "before"
    assert done.returncode == -signal.SIGSEGV


def test_memory_ends_and_a_context_takes_some(program: Program, tmp_path: Path) -> None:
    state = str(tmp_path / "ledger")
    found = printed(program, "memory_ends", SIMGPU_MEM_MB="1024", SIMGPU_STATE=state)
    assert found == "724 of 1024"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SIMGPU_COUNT": "3"}, "3 True"),
        ({"SIMGPU_COUNT": "2", "SIMGPU_NO_P2P": "1"}, "2 False"),
        ({"SIMGPU_COUNT": "4", "CUDA_VISIBLE_DEVICES": "3,1"}, "2 True"),
        ({"SIMGPU_COUNT": "4", "CUDA_VISIBLE_DEVICES": "2,9,1"}, "1"),
        ({"SIMGPU_COUNT": "1", "SIMGPU_MIG": "3"}, "1"),
    ],
)
def test_devices(program: Program, environment: dict[str, str], expected: str) -> None:
    assert printed(program, "devices", **environment) == expected


@pytest.mark.parametrize("refused", ["0", "1"])
def test_tensors_move_between_devices(program: Program, refused: str) -> None:
    """Also without peer access, through the host."""
    environment = {"SIMGPU_COUNT": "2", "SIMGPU_NO_P2P": refused}
    assert printed(program, "tensors_move_between_devices", **environment) == "True"
