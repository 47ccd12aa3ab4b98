"""The GPUs of AMD's that the notebook may use, and what each rank sees of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nbdist.clusters.hosts import amd_gpus
from nbdist.clusters.hosts.gpu import Gpu, visibility
from nbdist.clusters.hosts.machine import Host, this_host
from nbdist.clusters.placement import assign_devices
from nbdist.config import ClusterConfig

MIB = 2**20


def numbers(**environment: str) -> list[int | None]:
    """HIP's numbers of the GPUs that are visible with these variables."""
    os.environ.update(environment)  # the fixture has removed them, and restores them
    return [gpu.hip_number for gpu in this_host().gpus]


@pytest.fixture
def four(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        del os.environ[name]  # so that it is restored
    smi.GPUS = [smi.Gpu(f"0x{i:016X}", f"0000:0{i}:00.0", i) for i in (1, 2, 3)]
    smi.GPUS.append(smi.Gpu("0x00000000000000AB", "0000:09:00.0", 0))


def test_gpus_have_the_uuids_of_hip_and_their_memory(smi: Any) -> None:
    assert this_host().gpus == (
        Gpu("GPU-0123456789abcdef", "AMD Instinct MI300X", 196_592 * MIB, 0),
        Gpu("GPU-fedcba9876543210", "AMD Instinct MI300X", 196_592 * MIB, 1),
    )


def test_the_order_is_that_of_hip(four: None) -> None:
    uuids = [gpu.uuid for gpu in this_host().gpus]
    assert uuids == [f"GPU-{i:016x}" for i in (0xAB, 1, 2, 3)]


def test_without_the_order_of_hip_it_is_that_of_amdsmi(four: None, smi: Any) -> None:
    del smi.amdsmi_get_gpu_enumeration_info  # as before ROCm 6.4
    uuids = [gpu.uuid for gpu in this_host().gpus]
    assert uuids == [f"GPU-{i:016x}" for i in (1, 2, 3, 0xAB)]


@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ({}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "GPU-0000000000000002, 1"}, [2, 1]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,7,2"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        # HIP numbers what this one leaves.
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, [0, 1]),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "8"}, []),
    ],
)
def test_the_variables_choose(
    four: None, environment: dict[str, str], visible: list[int]
) -> None:
    assert numbers(**environment) == visible


def test_the_runtimes_variable_applies_first(four: None) -> None:
    os.environ["ROCR_VISIBLE_DEVICES"] = "3,1"
    assert [gpu.uuid[-1] for gpu in this_host().gpus] == ["3", "1"]


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_a_variable_that_hides_all_is_named(four: None, name: str) -> None:
    os.environ[name] = "9"
    assert this_host().why_no_gpu == f"{name}='9' matches no GPU"


def test_a_gpu_without_a_uuid_and_a_partition_have_their_pci_address(smi: Any) -> None:
    shared = "0x0123456789ABCDEF"
    smi.GPUS = [
        smi.Gpu("N/A", "0000:01:00.0", 0),
        smi.Gpu("0x0000000000000000", "0000:02:00.0", 1),
        smi.Gpu(shared, "0000:03:00.0", 2),
        smi.Gpu(shared, "0000:03:00.1", 3),
    ]
    uuids = [gpu.uuid for gpu in this_host().gpus]
    assert uuids == ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:03:00.1"]


def test_a_lost_gpu_is_left_out(smi: Any) -> None:
    lost = smi.AmdSmiException("lost")
    smi.GPUS[0] = smi.Gpu(serial=lost, address=lost)
    assert [gpu.uuid for gpu in this_host().gpus] == ["GPU-fedcba9876543210"]


def test_a_gpu_that_tells_little_is_used(smi: Any) -> None:
    smi.GPUS = [smi.Gpu(name="N/A", vram=smi.AmdSmiException("not supported"))]
    assert this_host().gpus == (Gpu("GPU-0123456789abcdef", "AMD GPU", None, 0),)


def test_the_reason_for_no_gpu(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.GPUS = []
    assert this_host().why_no_gpu == "no AMD GPU was found"
    smi.GPUS = smi.AmdSmiException("no access")
    assert this_host().why_no_gpu == "the AMD driver counts no GPUs (no access)"
    smi.DRIVER = smi.AmdSmiException("not loaded")
    assert this_host().why_no_gpu == "no AMD driver was found (not loaded)"
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert "but amdsmi is missing" in this_host().why_no_gpu


def test_a_missing_library_is_the_reason(
    smi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "amdsmi.py").write_text("{}['libamd_smi.so']\n")  # as version 7.0 does
    monkeypatch.delitem(sys.modules, "amdsmi")
    monkeypatch.syspath_prepend(tmp_path)
    why = this_host().why_no_gpu
    assert "libamd_smi.so cannot be loaded" in why
    monkeypatch.setitem(sys.modules, "amdsmi", smi)


@pytest.mark.parametrize("is_rocm", [False, True])
def test_the_build_of_torch_decides(
    is_rocm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "torch" / "lib" / f"libtorch_{'hip' if is_rocm else 'cuda'}.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert amd_gpus.torch_is_built_for_them() == is_rocm
    assert "torch" not in sys.modules


def test_what_each_rank_sees() -> None:
    cards = tuple(Gpu(f"GPU-{i}", "Card", 80 * 2**30, i) for i in (4, 6))
    host = Host("box", 16, cards)

    def seen(**options: Any) -> list[dict[str, str]]:
        assignments = assign_devices(ClusterConfig(**options), host)
        return [each.visibility for each in assignments]

    assert seen(n=2) == [{"HIP_VISIBLE_DEVICES": "4,6"}] * 2
    assert seen(n=3, ranks_per_gpu=2) == [
        {"HIP_VISIBLE_DEVICES": "4"},
        {"HIP_VISIBLE_DEVICES": "4"},
        {"HIP_VISIBLE_DEVICES": "6"},
    ]
    # HIP takes an empty list for no list.
    assert seen(n=1, device="cpu") == [{"HIP_VISIBLE_DEVICES": "-1"}]
    assert visibility((), of=()) == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_module_in_the_place_of_torch_is_no_rocm_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert not amd_gpus.torch_is_built_for_them()
