"""The report of the collectives' benchmark."""

from __future__ import annotations

from typing import Any

from benchmarks.collectives import MIB, card_bandwidth, report

CHECK = {"4": 1e-6, f"{MIB} share": 0.01}


def row(device: str, sharing: int, **seconds: float) -> dict[str, Any]:
    return {
        "ranks": 4, "bytes": 64 * MIB, "seconds": seconds, "device": device,
        "sharing": sharing, "check": CHECK,
    }  # fmt: skip


def test_all_ranks_of_a_gpu_copy_at_once() -> None:
    shared = row("cuda", 4, copy=1e-3)
    assert card_bandwidth(shared) == 2 * 4 * 64 * MIB / 1e-3


def test_each_device_has_the_columns_it_needs() -> None:
    on_gpu = row("cuda", 4, nbdist=2e-3, staged=9e-3, gloo=40e-3, copy=1e-3)
    on_cpu = row("cpu", 1, nbdist=20e-3, mpi=30e-3, gloo=60e-3, copy=9e-3)
    text = report([on_gpu, on_cpu])
    tables = text.split("### ")[1:]
    assert tables[0].startswith("4 ranks, CPU tensors")
    assert "card's copy" not in tables[0]
    heads = "| size | nbdist | staged | gloo | copy | busbw GB/s | card's copy GB/s |"
    assert heads in tables[1]
    # 2 * 3/4 * 64 MiB in 2 ms; gloo takes 20 times as long.
    assert (
        "| 64 MiB | 2000.0 | 9000.0 | 40000.0 | 1000.0 | 50.33 | 537 | 20.0 | 20.00 |"
        in (tables[1])
    )
