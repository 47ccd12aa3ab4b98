"""The order and the results of the copies of the pipeline, without ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_transports import PutOff
from torch import Tensor

from nbdist.collectives.transports.copy_pipeline import (
    BlockingCopier,
    Piece,
    Pipeline,
    WaitForCopy,
)


class Recorder(PutOff):
    """Records the copies that are started and waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self._count = itertools.count()

    def fetch(self, source: Tensor, target: Tensor) -> WaitForCopy:
        return self._recorded("fetch", super().fetch(source, target))

    def store(self, source: Tensor, target: Tensor) -> WaitForCopy:
        return self._recorded("store", super().store(source, target))

    def _recorded(self, what: str, ticket: WaitForCopy) -> WaitForCopy:
        name = f"{what} {next(self._count)}"
        self.log.append(name)

        def wait() -> None:
            self.log.append(f"await {name}")
            ticket()

        return wait


def doubling(tensor: Tensor, size: int, log: list[str] | None = None) -> list[Piece]:
    def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
        if log is not None:
            log.append("move")
        to_host[0].mul_(2)

    return [Piece([each], [each], move, True) for each in tensor.split(size)]


def test_the_neighbours_are_copied_while_a_piece_is_moved() -> None:
    copier = Recorder()
    tensor = torch.arange(30.0)
    Pipeline(copier, 40).run(doubling(tensor, 10, copier.log))
    assert torch.equal(tensor, torch.arange(30.0) * 2)
    assert copier.log == [
        "fetch 0", "fetch 1", "await fetch 0", "move", "store 2",
        "fetch 3", "await fetch 1", "move", "store 4",
        "await fetch 3", "move", "store 5",
    ]  # fmt: skip


def test_memory_is_allocated_once_and_not_overwritten_while_it_is_read() -> None:
    copier = Recorder()
    pipeline = Pipeline(copier, 40)
    for _ in range(3):
        tensor = torch.arange(95.0)
        pipeline.run(doubling(tensor, 10))  # PutOff sees what is overwritten too soon
        assert torch.equal(tensor, torch.arange(95.0) * 2)
    assert copier.allocations == 3
    pipeline.run(doubling(torch.ones(100), 50))
    assert copier.allocations == 5, "two buffers had to grow"


def test_one_piece_takes_one_copy_in_each_direction() -> None:
    copier = Recorder()
    Pipeline(copier, 400).run(doubling(torch.ones(3), 10))
    assert copier.log == ["fetch 0", "await fetch 0", "store 1"]


def test_nothing_is_written_when_the_first_move_fails() -> None:
    copier = PutOff()
    pipeline = Pipeline(copier, 40)
    tensor = torch.arange(30.0)

    def refuse(to_host: list[Tensor], from_host: list[Tensor]) -> None:
        raise ValueError("another call")

    pieces = [Piece([each], [each], refuse, True) for each in tensor.split(10)]
    with pytest.raises(ValueError, match="another call"):
        pipeline.run(pieces)
    assert torch.equal(tensor, torch.arange(30.0))
    pipeline.run(doubling(tensor, 10))
    assert torch.equal(tensor, torch.arange(30.0) * 2)


@settings(max_examples=50)
@given(
    length=st.integers(0, 200),
    piece=st.integers(1, 70),
    dtype=st.sampled_from([torch.int8, torch.float64, torch.complex128]),
)
def test_tensors_of_any_length_go_to_and_from_the_host(
    length: int, piece: int, dtype: torch.dtype
) -> None:
    sources = [torch.arange(length).to(dtype), torch.arange(length // 2).to(dtype)]
    targets = [torch.full((length,), 9).to(dtype) for _ in range(2)]

    def move(to_host: list[Tensor], from_host: list[Tensor]) -> None:
        assert [each.dtype for each in (*to_host, *from_host)] == [dtype] * 4
        from_host[0].copy_(to_host[0] + 1)
        from_host[1].zero_()
        from_host[1][: len(to_host[1])] = to_host[1]

    bounds = range(0, max(length, 1), piece)
    pieces = [
        Piece(
            [each[at : at + piece] for each in sources],
            [each[at : at + piece] for each in targets],
            move,
        )
        for at in bounds
    ]
    Pipeline(PutOff(), 64).run(pieces)
    assert torch.equal(targets[0], sources[0] + 1)
    assert torch.equal(targets[1][: length // 2], sources[1])
    assert (targets[1][length // 2 :] == 0).all()


@given(length=st.integers(0, 50), size=st.integers(1, 20))
def test_any_device_is_copied_by_blocking_copies(length: int, size: int) -> None:
    tensor = torch.arange(float(length))
    Pipeline(BlockingCopier(), 40).run(doubling(tensor, size))
    assert torch.equal(tensor, torch.arange(float(length)) * 2)


class ReadsLater:
    """A tensor of a device that reads what it is copied from when it is needed."""

    def copy_(self, source: Tensor) -> None:
        self.source = source


def test_a_device_may_read_the_host_memory_after_the_copy() -> None:
    host, device = torch.ones(3), ReadsLater()
    BlockingCopier().store(host, device)()  # type: ignore[arg-type]
    host.zero_()  # the next piece
    assert device.source.tolist() == [1.0] * 3
