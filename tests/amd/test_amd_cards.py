"""What a probe tells of a GPU of AMD's."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.telemetry.cards import Reading, open_card
from nbdist.telemetry.probes import GpuProbe, process_memory

UUID = "GPU-fedcba9876543210"
MIB = 2**20


def test_a_gpu_is_found_by_its_uuid(smi: Any) -> None:
    smi.GPUS[1].activity = 42
    probe = GpuProbe("cuda:0", UUID)
    sample = probe.sample(3)
    probe.close()
    assert (sample.rank, sample.device, sample.utilisation) == (3, "cuda:0", 42.0)
    assert (sample.memory_used, sample.memory_total) == (1024 * MIB, 196_592 * MIB)
    assert (sample.temperature, sample.power) == (61.0, 540.0)


def test_an_average_power_comes_first(smi: Any) -> None:
    smi.GPUS[1].average_watts = 300
    card = open_card(UUID)
    assert card is not None
    assert card.read().power == 300.0
    card.close()


def test_what_the_gpu_does_not_tell_is_none(smi: Any) -> None:
    no = smi.AmdSmiException("not supported")
    smi.GPUS[1] = smi.Gpu(
        "0xFEDCBA9876543210", "0000:26:00.0", 1, vram=no, activity="N/A", degrees=no,
        watts="N/A", processes=no,
    )  # fmt: skip
    card = open_card(UUID)
    assert card is not None
    assert card.read() == Reading()
    assert card.process_memory(1) is None
    card.close()


def test_the_memory_of_a_process(smi: Any) -> None:
    smi.GPUS[1].processes = [(77, 5 * MIB), (78, 6 * MIB)]
    assert process_memory(UUID, 78) == 6 * MIB
    assert process_memory(UUID, 79) is None


@pytest.mark.parametrize("uuid", ["GPU-0000000000000001", "0000:26:00.0"])
def test_an_unknown_gpu_has_no_values(smi: Any, uuid: str) -> None:
    assert open_card(uuid) is None
    assert GpuProbe("cuda:0", uuid).sample(0).memory_used is None


def test_without_a_driver_there_are_no_values(smi: Any) -> None:
    smi.DRIVER = smi.AmdSmiException("not loaded")
    assert open_card(UUID) is None
