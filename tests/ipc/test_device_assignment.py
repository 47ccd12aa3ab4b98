"""The device assignments of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.ipc.device_assignment import DeviceAssignment, write_assignments

GIB = 2**30


def assignment(memory_cap: float | int | None) -> DeviceAssignment:
    return DeviceAssignment(
        rank=0,
        host="box",
        gpu_uuid="GPU-0",
        visible_gpus=("GPU-0",),
        visibility={"CUDA_VISIBLE_DEVICES": "GPU-0"},
        gpu_name="Card",
        shares_gpu=True,
        memory_cap=memory_cap,
        threads=1,
    )


@pytest.mark.parametrize(
    ("cap", "fraction"),
    [(None, None), (0.25, 0.25), (1.0, 1.0), (2 * GIB, 0.2), (1, 0.1 / GIB),
     (11 * GIB, 1.0)],
)  # fmt: skip
def test_a_cap_in_bytes_is_a_fraction_of_the_memory_that_cuda_reports(
    cap: float | int | None, fraction: float | None, tmp_path: Path
) -> None:
    write_assignments(tmp_path, [assignment(cap)])
    read = DeviceAssignment.read(tmp_path, 0)
    assert read == assignment(cap)
    assert read.memory_fraction(10 * GIB) == pytest.approx(fraction)


@pytest.mark.parametrize(("gpu", "index"), [("GPU-0", 0), ("GPU-2", 2), (None, None)])
def test_the_number_of_a_gpu_is_that_among_the_visible_ones(
    gpu: str | None, index: int | None
) -> None:
    visible = tuple(f"GPU-{number}" for number in range(3))
    rank = replace(assignment(None), gpu_uuid=gpu, visible_gpus=visible)
    assert rank.gpu_index == index
