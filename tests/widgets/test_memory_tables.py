"""The tables of `%dist_memory`."""

from __future__ import annotations

from nbdist.widgets.looking import memory_table, tensors_table
from nbdist.wire import HeldTensor, MemoryReport

MIB = 1 << 20
WEIGHT = HeldTensor("model.weight", "Parameter", (256, 1024), "float32", "cuda:0", MIB)


def on_gpu(index: int, *more: HeldTensor) -> MemoryReport:
    """A rank whose allocator has 3 MiB in tensors, 1 MiB of it without an object."""
    device = f"cuda:{index}"
    weight = HeldTensor(*WEIGHT.__dict__.values()).__dict__ | {"device": device}
    sizes = {
        "resident": 700 * MIB, "allocated": 4 * MIB + 1, "reserved": 20 * MIB,
        "limit": 80 * MIB, "process": 500 * MIB,
    }  # fmt: skip
    return MemoryReport(
        sizes, {device: 2 * MIB}, {device: 1200}, (HeldTensor(**weight), *more)
    )


def lines_of(table: object) -> list[str]:
    return str(table).splitlines()


def test_each_rank_has_a_row_for_its_gpu_and_one_for_the_host() -> None:
    lines = lines_of(memory_table({0: on_gpu(0), 1: on_gpu(1), 2: None}))
    assert lines[2].split() == ["0", "cpu", "0", "0", "MiB", "700", "MiB"]
    assert " ".join(lines[3].split()) == (
        "0 cuda:0 1,200 2 MiB 4 MiB of 20 MiB reserved, at most 80 MiB 500 MiB"
    )
    assert lines[5].split()[:2] == ["1", "cuda:1"]
    assert "rank 0: 2 MiB on cuda:0 are in tensors that no Python object" in lines[6]
    assert lines[-1] == "rank 2 does not answer"


def test_a_tensor_that_ranks_have_on_their_own_gpus_has_one_row() -> None:
    extra = HeldTensor("batch", "Tensor", (7,), "int64", "cuda:1", 2 * MIB)
    lines = lines_of(tensors_table({0: on_gpu(0), 1: on_gpu(1, extra), 2: None}, 2))
    assert lines[2].split() == ["batch", "1", "Tensor", "(7,)", "int64", "2", "MiB"]
    assert lines[3].split()[:3] == ["model.weight", "all", "Parameter"]
    assert len(lines) == 4
    assert len(lines_of(tensors_table({0: on_gpu(0), 1: on_gpu(1, extra)}, 1))) == 3


def test_tensors_of_a_rank_without_a_name_are_counted() -> None:
    unknown = [
        HeldTensor("", "Tensor", (size,), "uint8", "cpu", size) for size in (10, 20, 20)
    ]
    report = MemoryReport({}, {"cpu": 50}, {"cpu": 3}, tuple(unknown), "some are slow")
    lines = lines_of(tensors_table({3: report}, 9))
    names = [line.split("  ")[0] for line in lines[2:4]]
    assert names == ["(no name leads to it) ×2", "(no name leads to it)"]
    assert lines[-1] == "rank 3: some are slow"
