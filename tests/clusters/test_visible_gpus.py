"""The GPUs that the notebook may use, as a simulated driver describes them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from nbdist.clusters.hosts.gpu import Gpu
from nbdist.clusters.hosts.machine import this_host
from nbdist.errors import UsageError


class NVMLError(Exception):
    """Any error of the driver."""


class NotSupported(NVMLError):
    """NVMLError_NotSupported."""


class NotFound(NVMLError):
    """NVMLError_NotFound."""


class GpuIsLost(NVMLError):
    """NVMLError_GpuIsLost."""


class NoPermission(NVMLError):
    """NVMLError_NoPermission."""


@dataclass
class Card:
    """A GPU of the machine. A value that is an exception is raised."""

    uuid: str | NVMLError
    name: str | NVMLError = "Card"
    memory: int | NVMLError = 80
    mig: int | NVMLError = 0
    parts: list[Card] = field(default_factory=list)
    mode: int | NVMLError = 0
    lost: bool = False


class Driver(ModuleType):
    """NVML, for cards in the order of the PCI bus."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVMLError_NotFound = NotFound
    NVMLError_GpuIsLost = GpuIsLost
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3

    def __init__(self, *cards: Card) -> None:
        super().__init__("pynvml")
        self.cards = cards

    def nvmlInit(self) -> None:
        pass

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self) -> int:
        if not self.cards:
            raise NoPermission("no access")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        if self.cards[index].lost:
            raise NVMLError("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> Any:
        return answer(card.uuid)

    def nvmlDeviceGetName(self, card: Card) -> Any:
        return answer(card.name)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        return SimpleNamespace(total=answer(card.memory))

    def nvmlDeviceGetComputeMode(self, card: Card) -> Any:
        return answer(card.mode)

    def nvmlDeviceGetMigMode(self, card: Card) -> tuple[int, int]:
        return answer(card.mig), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return len(card.parts) + 1

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:
        if index == len(card.parts):
            raise NotFound
        if card.parts[index].lost:
            raise NoPermission
        return card.parts[index]


def answer(value: Any) -> Any:
    """A value; raises it if it is an exception."""
    if isinstance(value, NVMLError):
        raise value
    return value


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns the GPUs of a machine with these cards."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def find(*cards: Card, **environment: str) -> tuple[Gpu, ...]:
        monkeypatch.setitem(sys.modules, "pynvml", Driver(*cards))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return this_host().gpus

    return find


def uuids(gpus: tuple[Gpu, ...]) -> list[str]:
    return [gpu.uuid for gpu in gpus]


def test_all_gpus_are_visible(seen: Any) -> None:
    assert seen(Card("GPU-a"), Card("GPU-b")) == (
        Gpu("GPU-a", "Card", 80),
        Gpu("GPU-b", "Card", 80),
    )


def test_a_gpu_without_memory_of_its_own_has_the_memory_of_the_host(seen: Any) -> None:
    (gpu,) = seen(Card("GPU-a", memory=NotSupported()))
    assert gpu.memory == psutil.virtual_memory().total


def test_a_lost_gpu_is_left_out(seen: Any) -> None:
    assert uuids(seen(Card("GPU-a", lost=True), Card("GPU-b"))) == ["GPU-b"]


@pytest.mark.parametrize("error", [NotSupported(), NoPermission(), NVMLError("lost")])
def test_a_gpu_with_unknown_mig_mode_is_one_gpu(seen: Any, error: NVMLError) -> None:
    assert uuids(seen(Card("GPU-a", mig=error))) == ["GPU-a"]


def test_mig_devices_replace_their_gpu(seen: Any) -> None:
    card = Card("GPU-a", mig=1, parts=[Card("MIG-1", memory=10), Card("MIG-2")])
    gpus = seen(card)
    assert uuids(gpus) == ["MIG-1", "MIG-2"]
    assert gpus[0].is_mig


@pytest.mark.parametrize(
    "part",
    [
        Card("MIG-1", lost=True),
        Card(NoPermission()),
        Card(GpuIsLost()),
        Card("MIG-1", memory=GpuIsLost()),
    ],
)
def test_a_mig_device_that_is_out_of_reach_is_left_out(seen: Any, part: Card) -> None:
    card = Card("GPU-a", mig=1, parts=[part, Card("MIG-2")])
    assert uuids(seen(card)) == ["MIG-2"]


@pytest.mark.parametrize(
    "parts", [[], [Card("MIG-1", lost=True)], [Card(NoPermission())]]
)
def test_a_gpu_in_mig_mode_is_left_out_without_a_mig_device_that_one_may_use(
    seen: Any, parts: list[Card]
) -> None:
    closed = Card("GPU-b", mig=1, parts=parts)
    assert uuids(seen(Card("GPU-a"), closed)) == ["GPU-a"]
    assert seen(closed) == ()
    assert "GPU 0 is in MIG mode" in this_host().why_no_gpu


@pytest.mark.parametrize("error", [NotSupported(), NoPermission(), NVMLError("old")])
def test_a_mig_device_of_which_nvml_knows_little_is_used(
    seen: Any, error: NVMLError
) -> None:
    part = Card("MIG-1", memory=error)
    (gpu,) = seen(Card("GPU-a", name=error, mig=1, parts=[part]))
    assert gpu == Gpu("MIG-1", "GPU 0", None)


def test_a_driver_that_counts_no_gpus_is_the_reason_for_none(seen: Any) -> None:
    assert seen() == ()
    assert "counts no GPUs (no access)" in this_host().why_no_gpu


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1,0", ["GPU-b2", "GPU-a1"]),
        ("0,7,1", ["GPU-a1"]),  # CUDA ignores what follows an unknown number
        ("GPU-b", ["GPU-b2"]),
        ("0,GPU-b2", ["GPU-a1", "GPU-b2"]),
        ("0,,1", ["GPU-a1"]),
        ("0,", ["GPU-a1"]),
        (" 1 ", ["GPU-b2"]),
        ("0,-1,1", ["GPU-a1"]),
        ("0,7,0", ["GPU-a1"]),
        ("²", []),
        ("GPU-", []),  # of both
        ("", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_is_respected(
    seen: Any, visible: str, expected: list[str]
) -> None:
    gpus = seen(Card("GPU-a1"), Card("GPU-b2"), CUDA_VISIBLE_DEVICES=visible)
    assert uuids(gpus) == expected


def test_an_empty_entry_names_no_gpu(seen: Any) -> None:
    assert uuids(seen(Card("GPU-a1"), CUDA_VISIBLE_DEVICES="0,")) == ["GPU-a1"]


@pytest.mark.parametrize("visible", ["0,0", "1,0,1", "GPU-a,GPU-a1", "0,GPU-a"])
def test_a_gpu_that_is_named_twice_is_refused(seen: Any, visible: str) -> None:
    with pytest.raises(UsageError, match=rf"'{visible}' names .* --ranks-per-gpu 2"):
        seen(Card("GPU-a1"), Card("GPU-b2"), CUDA_VISIBLE_DEVICES=visible)


@pytest.mark.parametrize(
    ("mode", "expected"), [(0, None), (2, 0), (3, 1), (NotSupported(), None)]
)
def test_the_compute_mode_limits_the_processes(
    seen: Any, tmp_path: Path, mode: int | NVMLError, expected: int | None
) -> None:
    folder = str(tmp_path)
    (gpu,) = seen(Card("GPU-a", mode=mode), CUDA_MPS_PIPE_DIRECTORY=folder)
    assert gpu.most_processes == expected
    parts = [Card("MIG-1")]
    (part,) = seen(Card("GPU-a", mode=mode, mig=1, parts=parts))
    assert part.most_processes == expected


def test_mps_lets_processes_share_a_gpu_of_one_process(
    seen: Any, tmp_path: Path
) -> None:
    (tmp_path / "control").touch()
    card = Card("GPU-a", mode=3)
    (gpu,) = seen(card, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))
    assert gpu.most_processes is None


def test_numbers_of_unequal_gpus_need_the_order_of_the_bus(seen: Any) -> None:
    cards = Card("GPU-a", "Slow"), Card("GPU-b", "Fast")
    with pytest.raises(UsageError, match=r"'1' numbers .*CUDA_DEVICE_ORDER"):
        seen(*cards, CUDA_VISIBLE_DEVICES="1")
    named = seen(*cards, CUDA_VISIBLE_DEVICES="GPU-b")
    numbered = seen(*cards, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert uuids(named) == uuids(numbered) == ["GPU-b"]
