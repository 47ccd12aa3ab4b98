"""Tensors on a device of torch's PrivateUse1: operations, messages, and Mirrored.

The device is that of private_device.cpp. The host cannot read its memory.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import launch

HERE = Path(__file__).parent
FUNCTIONS = str(HERE / "device_functions.py")
TORCH = Path(torch.__file__).parent
RANKS = 2

pytestmark = [
    pytest.mark.timeout(320),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compiled device."""
    made = tmp_path_factory.mktemp("device") / "libprivate.so"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-fPIC", "-shared", "-o", str(made)),
            *("-isystem", str(TORCH / "include"), str(HERE / "private_device.cpp")),
            *("-isystem", str(TORCH / "include/torch/csrc/api/include")),
            *(f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"),
        ],
        check=True,
        timeout=200,
    )
    return str(made)


@pytest.fixture(scope="module")
def found(library: str) -> list[dict[str, Any]]:
    """The results of all cases on each rank."""
    call = "run_on_private_device"
    return launch(RANKS, FUNCTIONS, call, library, deadline_s=200)


def test_the_host_cannot_read_the_memory(library: str) -> None:
    read = (
        "import ctypes, private_device, torch\n"
        f"x = torch.ones(3, device=private_device.load({library!r}))\n"
        "assert x.sum().item() == 3\n"
        "ctypes.string_at(x.data_ptr(), 4)"
    )
    ended = subprocess.run([sys.executable, "-c", read], cwd=HERE, timeout=100)
    assert ended.returncode == -signal.SIGSEGV


def test_every_operation_goes_through_host_memory(found: list[dict[str, Any]]) -> None:
    for here in found:
        assert all(here["operations"]), here["operations"]
        assert "staged through host memory (PRIVATE)" in here["transport"]


def test_tensors_on_other_kinds_of_device_are_a_mismatch(
    found: list[dict[str, Any]],
) -> None:
    for here in found:
        assert "private" in here["mismatch"]
        assert here["mismatch"].endswith("[1.0, 1.0, 1.0]")  # no data was touched


def test_a_message_arrives(found: list[dict[str, Any]]) -> None:
    assert found[1]["messages"] == [7.0, 7.0, 7.0]


@pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="torch 2.7 waits for no device that is initialised without its module",
)
def test_an_asynchronous_call_waits_for_the_device(found: list[dict[str, Any]]) -> None:
    assert [here["waits"] for here in found] == [2, 2]  # before and after


@pytest.mark.parametrize("case", ["mirrored", "mirrored adam"])
def test_ranks_end_with_the_weights_of_one_process(
    case: str, found: list[dict[str, Any]]
) -> None:
    first, second = (here[case] for here in found)
    assert torch.equal(first["weights"], second["weights"])
    assert first["distance"] < 1e-9  # float64
