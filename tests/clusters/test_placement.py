"""The placement of ranks on simulated hosts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.clusters.hosts.gpu import Gpu
from nbdist.clusters.hosts.machine import Host
from nbdist.clusters.placement import assign_devices
from nbdist.config import ClusterConfig
from nbdist.errors import UsageError
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.ipc.resources import memory_fraction

GIB = 2**30
CPU_HOST = Host("box", cores=8)


def gpu_host(gpus: int, gib: int = 80) -> Host:
    cards = (Gpu(f"GPU-{i}", "Card", gib * GIB) for i in range(gpus))
    return Host("box", cores=16, gpus=tuple(cards))


def gpus_of(assigned: list[DeviceAssignment]) -> list[str]:
    return [each.gpu_uuid for each in assigned if each.gpu_uuid is not None]


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (4, 4), (64, 4)])
def test_without_gpus_n_is_the_number_of_cores_up_to_four(cores: int, expected: int):
    assert len(assign_devices(ClusterConfig(), Host("box", cores))) == expected


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_with_gpus_n_is_one_per_gpu(gpus: int):
    assigned = assign_devices(ClusterConfig(), gpu_host(gpus))
    assert gpus_of(assigned) == [f"GPU-{i}" for i in range(gpus)]
    assert not any(p.shares_gpu for p in assigned)
    assert {p.memory_cap for p in assigned} == {None}
    assert [p.gpu_index for p in assigned] == list(range(gpus))  # cuda:{local_rank}
    assert {len(p.visible_gpus) for p in assigned} == {gpus}


def test_a_rank_on_a_mig_device_sees_only_this_device():
    host = Host("box", 16, tuple(Gpu(f"MIG-{i}", "Card", 10 * GIB) for i in range(2)))
    assigned = assign_devices(ClusterConfig(), host)
    assert [p.visible_gpus for p in assigned] == [("MIG-0",), ("MIG-1",)]
    assert [p.gpu_index for p in assigned] == [0, 0]


def test_ranks_share_a_gpu_whose_memory_is_not_known():
    host = Host("box", 16, (Gpu("GPU-0", "Card", None),))

    def fractions(**options: object) -> set[float | None]:
        config = ClusterConfig(n=2, ranks_per_gpu=2, **options)  # type: ignore[arg-type]
        return {each.memory_cap for each in assign_devices(config, host)}

    assert fractions() == {None}
    assert fractions(gpu_memory=0.25) == {0.25}
    with pytest.raises(
        UsageError, match=r"does not tell the memory of this card.*fraction"
    ):
        fractions(gpu_memory="8GiB")
    with pytest.raises(UsageError, match=r"1\.20 times the memory of Card"):
        fractions(gpu_memory=0.6)


def test_ranks_share_no_gpu_that_lets_one_process_use_it():
    gpus = tuple(Gpu(f"GPU-{i}", "Card", 80 * GIB, None, 1) for i in range(2))
    host = Host("box", 16, gpus)
    first = assign_devices(ClusterConfig(n=1), host)
    assert gpus_of(assign_devices(ClusterConfig(n=2), host, first)) == ["GPU-1"]
    for before in ((), first):
        with pytest.raises(
            UsageError, match=r"Card \(GPU-0\) has .* 2 ranks would .*-c 0.*MPS"
        ):
            assign_devices(ClusterConfig(n=2, ranks_per_gpu=2), host, before)


def test_a_gpu_that_no_process_may_use_is_refused():
    host = Host("box", 16, (Gpu("GPU-0", "Card", None, None, 0),))
    with pytest.raises(UsageError, match=r"mode 'prohibited'.*`nvidia-smi -c 0`"):
        assign_devices(ClusterConfig(), host)
    assert assign_devices(ClusterConfig(n=2, device="cpu"), host)


def test_device_cpu_uses_no_gpu():
    assigned = assign_devices(ClusterConfig(n=2, device="cpu"), gpu_host(2))
    assert gpus_of(assigned) == []
    assert {(p.visible_gpus, p.gpu_index) for p in assigned} == {((), None)}


def test_ranks_that_share_a_gpu_are_neighbours_and_share_its_memory():
    assigned = assign_devices(ClusterConfig(n=4, ranks_per_gpu=2), gpu_host(2))
    assert gpus_of(assigned) == [
        "GPU-0",
        "GPU-0",
        "GPU-1",
        "GPU-1",
    ]
    assert all(p.shares_gpu for p in assigned)
    assert {p.memory_cap for p in assigned} == {0.5 - 0.5 / 80}  # and a context
    assert {(p.visible_gpus, p.gpu_index) for p in assigned} == {
        (("GPU-0",), 0),
        (("GPU-1",), 0),
    }


def test_default_n_counts_the_ranks_per_gpu():
    assert len(assign_devices(ClusterConfig(ranks_per_gpu=3), gpu_host(2))) == 6


def test_a_given_cap_replaces_the_even_share():
    config = ClusterConfig(n=2, ranks_per_gpu=2, gpu_memory="8GiB")
    assert {p.memory_cap for p in assign_devices(config, gpu_host(1))} == {8 * GIB}


@pytest.mark.parametrize(
    ("config", "host", "parts"),
    [
        (ClusterConfig(n=0), CPU_HOST, ["-n 0", "1 or more"]),
        (ClusterConfig(n=-3), CPU_HOST, ["-n -3"]),
        (ClusterConfig(n=True), CPU_HOST, ["-n True"]),
        (ClusterConfig(device="tpu"), CPU_HOST, ["'tpu'", "auto, cuda or cpu"]),
        (ClusterConfig(device="cuda"), CPU_HOST, ["box", "--device cpu"]),
        (ClusterConfig(threads=0), CPU_HOST, ["--threads 0"]),
        (ClusterConfig(ranks_per_gpu=2), CPU_HOST, ["--ranks-per-gpu 2", "leave it"]),
        (ClusterConfig(gpu_memory=0.5), CPU_HOST, ["--gpu-memory 0.5", "leave it"]),
        (ClusterConfig(n=4), gpu_host(2), ["-n 4", "2 GPUs", "--ranks-per-gpu 2", "2"]),
        (ClusterConfig(n=5), gpu_host(2), ["--ranks-per-gpu 3"]),
        (ClusterConfig(ranks_per_gpu=0), gpu_host(1), ["--ranks-per-gpu 0"]),
        (ClusterConfig(gpu_memory="100GiB"), gpu_host(1), ["100GiB", "80.0 GiB"]),
        (ClusterConfig(gpu_memory="much"), gpu_host(1), ["'much'", "8GiB"]),
        (ClusterConfig(gpu_memory=0), gpu_host(1), ["--gpu-memory 0"]),
        (
            ClusterConfig(n=2, ranks_per_gpu=2, gpu_memory=0.6),
            gpu_host(1),
            ["0.6", "2 ranks", "1.20 times", "at most 0.5 each"],
        ),
        (
            ClusterConfig(n=100),
            Host("box", 2, memory_available=22 * GIB),
            [
                "-n 100",
                "more than 8 would share each of the 2 cores",
                "25.0 GB to start",
                "23.6 GB are available",
                "Lower n to 16",
                "--oversubscribe",
            ],
        ),
        (
            ClusterConfig(n=9),
            Host("box", 1),
            ["more than 8", "the 1 core.", "Lower n to 8"],
        ),
        (
            ClusterConfig(n=4),
            Host("box", 8, memory_available=600_000_000),
            ["1.0 GB to start", "0.6 GB are available", "Lower n to 2"],
        ),
        (
            ClusterConfig(n=2),
            Host("box", 8, memory_available=1),
            ["Lower n to 1"],
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_with_the_next_step(
    config: ClusterConfig, host: Host, parts: list[str]
):
    with pytest.raises(UsageError) as refused:
        assign_devices(config, host)
    assert [part for part in parts if part not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("n", "running", "memory"),
    [(16, 0, None), (4, 0, 1_000_000_000), (6, 4, 500_000_000)],
)
def test_as_many_ranks_as_a_host_can_carry_are_started(
    n: int, running: int, memory: int | None
):
    host = Host("box", 2, memory_available=memory)
    before = assign_devices(ClusterConfig(n=running), CPU_HOST) if running else []
    added = assign_devices(ClusterConfig(n=n), host, before)
    assert [each.rank for each in added] == list(range(running, n))


def test_more_ranks_than_a_host_can_carry_are_started_with_oversubscribe():
    host = Host("box", 2, memory_available=1)
    assert len(assign_devices(ClusterConfig(n=32, oversubscribe=True), host)) == 32


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        ("0.25", 0.25), (0.25, 0.25), ("1", 1.0), (".5", 0.5), ("8GiB", 0.1),
        ("8 gib", 0.1), ("40G", 0.5), ("81920MiB", 1.0), (8 * GIB, 0.1),
    ],
)  # fmt: skip
def test_caps_are_fractions_or_sizes(cap: str | float, expected: float):
    assert memory_fraction(cap, 80 * GIB) == pytest.approx(expected)


@pytest.mark.parametrize("cap", ["0", "-1", "1.5GiBs", "GiB", "nan", "inf", "", "99T"])
def test_invalid_caps_are_refused(cap: str):
    with pytest.raises(UsageError, match="--gpu-memory"):
        memory_fraction(cap, 80 * GIB)


@pytest.mark.parametrize(
    ("cap", "said"), [("8GiB", "is a size"), ("0", "memory: pass")]
)
def test_of_an_unknown_memory_only_a_fraction_can_be_taken(cap: str, said: str):
    assert memory_fraction("0.25", None) == 0.25
    with pytest.raises(UsageError, match=said):
        memory_fraction(cap, None)


@given(
    gpus=st.integers(1, 8),
    per_gpu=st.integers(1, 6),
    n=st.integers(1, 60),
    threads=st.none() | st.integers(1, 9),
)
def test_every_placement_is_complete_and_fits(
    gpus: int, per_gpu: int, n: int, threads: int | None
):
    config = ClusterConfig(n=n, ranks_per_gpu=per_gpu, threads=threads)
    if n > gpus * per_gpu:
        with pytest.raises(UsageError, match="--ranks-per-gpu"):
            assign_devices(config, gpu_host(gpus))
        return
    assigned = assign_devices(config, gpu_host(gpus))
    assert [p.rank for p in assigned] == list(range(n))
    on_gpu = [p.gpu_uuid for p in assigned if p.gpu_uuid]
    assert len(on_gpu) == n
    assert max(map(on_gpu.count, on_gpu)) <= per_gpu
    assert on_gpu == sorted(on_gpu)
    assert all(p.threads == (threads or max(1, 16 // n)) for p in assigned)


@given(
    gpus=st.integers(1, 8),
    per_gpu=st.integers(1, 4),
    changes=st.lists(st.integers(0, 2**32), max_size=6),
)
def test_ranks_that_join_get_the_gpus_that_lost_ranks_had(
    gpus: int, per_gpu: int, changes: list[int]
):
    host, there = gpu_host(gpus), list[DeviceAssignment]()
    for drawn in changes:
        draw = random.Random(drawn)
        there = draw.sample(there, draw.randint(0, len(there)))  # the others have died
        n = draw.randint(max(1, len(there)), gpus * per_gpu)
        config = ClusterConfig(n=n, ranks_per_gpu=per_gpu)
        there += assign_devices(config, host, there)
        on_gpu = gpus_of(there)
        assert len(on_gpu) == n
        assert max(map(on_gpu.count, on_gpu)) <= per_gpu
        assert {each.shares_gpu for each in there} == {per_gpu > 1}


def test_a_rank_that_may_share_its_gpu_is_alike_before_and_after_another_joins():
    config = ClusterConfig(n=1, ranks_per_gpu=2)
    (first,) = assign_devices(config, gpu_host(2))
    (second,) = assign_devices(replace(config, n=2), gpu_host(2), [first])
    assert replace(second, rank=0) == replace(first, threads=second.threads)
