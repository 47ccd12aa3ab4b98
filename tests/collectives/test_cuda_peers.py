"""Whether one GPU may read another, and how its memory is mapped."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nbdist.collectives.sync import cuda_peers as peers


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs that this process sees. The first is current."""
    names = ["a", "b"]
    access = {(0, 1): True}
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(
        cuda, "get_device_properties", lambda at: SimpleNamespace(uuid=names[at])
    )
    monkeypatch.setattr(
        cuda, "can_device_access_peer", lambda *pair: access.get(pair, False)
    )
    return names


def test_a_shared_gpu_reads_itself(gpus: list[str]) -> None:
    assert peers.can_reach("a")


def test_cuda_is_asked_about_a_visible_gpu(gpus: list[str]) -> None:
    assert peers.can_reach("b")
    gpus[:] = ["b", "a"]  # now the second is current, and may not
    assert peers.can_reach("a")
    gpus[:] = ["a", "x", "b"]
    assert not peers.can_reach("b")


def test_access_to_an_invisible_gpu_is_tried(gpus: list[str]) -> None:
    assert peers.can_reach("hidden")


def test_memory_is_mapped_for_this_rank_s_device(gpus: list[str]) -> None:
    """The device may have another number on the rank that owns the memory."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    given = {name: f"the sender's {name}" for name in names}
    taken: dict[str, Any] = {}

    def rebuild(*arguments: Any) -> torch.Tensor:
        taken.update(zip(names, arguments, strict=True))
        return torch.empty(0)

    rebuild.__signature__ = inspect.signature(rebuild_cuda_tensor)  # type: ignore[attr-defined]
    assert peers._open((rebuild, tuple(given.values()))) is not None
    assert taken == {**given, "storage_device": 0, "event_sync_required": False}


def test_memory_that_cannot_be_mapped_is_none(gpus: list[str]) -> None:
    def fail(storage_device: int) -> torch.Tensor:
        raise RuntimeError("peer access is not supported")

    assert peers._open((fail, (1,))) is None
    assert peers._open(None) is None


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        (None, None),
        (0, False),  # it has no room
        (2, None),  # it may not share
        (4, [False, True]),  # it cannot open this rank's memory
        (6, False),  # it reads something else there
    ],
)
def test_no_rank_maps_memory_if_one_rank_cannot(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch, step: int | None, answer: Any
) -> None:
    others = torch.full((8,), 2, dtype=torch.uint8)
    answers = [True, os.getpid(), (lambda: others, ()), None, [True, True], None, True]
    if step is not None:
        answers[step] = answer
    found = mapped(monkeypatch, iter(answers))
    if step is None:
        assert found is not None
        assert found[0].tolist() == [1] * 8
        assert found[1] is others
    else:
        assert found is None


def test_memory_with_unexpected_content_is_not_used(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = torch.zeros(8, dtype=torch.uint8)
    answers = [True, os.getpid(), (lambda: wrong, ()), None, [True, True], None, True]
    assert mapped(monkeypatch, iter(answers)) is None


def mapped(monkeypatch: pytest.MonkeyPatch, answers: Any) -> list[torch.Tensor] | None:
    """The result on rank 0 of two ranks, for an answer of rank 1."""
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(peers, "_withdraw", lambda handle: None)
    monkeypatch.setattr(peers, "_given", deque())
    monkeypatch.setattr(
        peers, "_allocate", lambda size: torch.zeros(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(peers, "_handle", lambda memory: (lambda: memory, ()))
    return peers.map_memories(8, 0, lambda item: [item, next(answers)])


def test_handles_of_readers_that_have_ended_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead: Any = (print, ("the dead one's",))
    living: Any = (print, ("the living one's",))
    given = deque([(ended.pid, dead), (os.getpid(), living)])
    released: list[object] = []
    monkeypatch.setattr(peers, "_given", given)
    monkeypatch.setattr(peers, "_withdraw", released.append)
    for _ in range(2):  # each is released once
        peers._release_of_dead()
    assert released == [dead]
    assert list(given) == [(os.getpid(), living)]
