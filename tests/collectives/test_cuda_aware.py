"""CUDA-aware MPI is detected, and the device is synchronized before each message."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import launch

from nbdist.collectives.sync import cuda_aware
from nbdist.collectives.transports.mpi import DirectTransport

THIS_FILE = str(Path(__file__))


@pytest.fixture(autouse=True)
def _forget_answers() -> None:
    cuda_aware.takes_device_memory.cache_clear()


def mpich(answer: int, status: int = 0) -> Any:
    def query(kind: int, supported: Any) -> int:
        assert kind == 0
        supported._obj.value = answer
        return status

    def ends_the_process() -> int:
        raise AssertionError("asked although there is the safer one")

    return SimpleNamespace(
        MPIX_GPU_query_support=query, MPIX_Query_cuda_support=ends_the_process
    )


def open_mpi(answer: int) -> Any:
    return SimpleNamespace(MPIX_Query_cuda_support=lambda: answer)


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (open_mpi(1), True),
        (open_mpi(0), False),
        (mpich(1), True),
        (mpich(0), False),
        (mpich(1, status=3), False),
        (SimpleNamespace(), False),
    ],
)
def test_the_answer_of_the_library_decides(library: Any, expected: bool) -> None:
    assert cuda_aware.ask(library) is expected


def test_every_loaded_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [SimpleNamespace(), open_mpi(1)]
    monkeypatch.setattr(cuda_aware, "_loaded_libraries", lambda: iter(libraries))
    assert cuda_aware.takes_device_memory()


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False)])
def test_mvapich_must_be_enabled(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setattr(cuda_aware, "_loaded_libraries", lambda: iter([open_mpi(1)]))
    monkeypatch.setattr(
        cuda_aware.MPI, "get_vendor", lambda: ("MVAPICH2", (2, 3, 7)), raising=True
    )
    monkeypatch.setenv("MV2_USE_CUDA", value)
    assert cuda_aware.takes_device_memory() is expected


def installed() -> tuple[bool, int, str]:
    """On a rank: what is detected, the number of libraries asked, the description."""
    from mpi4py import MPI

    import nbdist.collectives as nc

    group = nc.Group(MPI.COMM_WORLD)
    shown = group.describe()
    group.close()
    asked = list(cuda_aware._loaded_libraries())
    assert all(isinstance(each, ctypes.CDLL) for each in asked)
    return cuda_aware.takes_device_memory(), len(asked), shown


def test_the_mpi_of_this_machine_is_found_and_asked() -> None:
    (says, asked, shown), *_ = launch(1, THIS_FILE, "installed")
    assert asked >= 1, "MPI's library was not found in this process"
    if not torch.cuda.is_available():
        assert says is False  # there is no device memory that it could take
    assert "CUDA" not in shown  # no tensor on a GPU was sent yet


def test_the_device_is_synchronized_before_each_message() -> None:
    log: list[str] = []

    class Comm:
        size, rank = 2, 0

        def Isend(self, *_: object) -> str:
            log.append("send")
            return "request"

        Irecv = Isend

    transport = DirectTransport(Comm(), lambda: None, lambda: log.append("settled"))  # type: ignore[arg-type]
    transport._send(torch.ones(3), 1)
    transport._receive(torch.ones(3), 1)
    assert log == ["settled", "send", "settled", "send"]
