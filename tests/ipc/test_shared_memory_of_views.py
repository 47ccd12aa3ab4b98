"""Views that share memory share it after they were sent."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from drawn_views import drawn, leaves, memory_of

from nbdist.clusters.cluster import Cluster
from nbdist.ipc import serialization
from nbdist.ipc.own_memory import Unreadable


def sent(values: dict[str, Any]) -> dict[str, Any]:
    frames = serialization.dumps_named(values)
    return serialization.loads_named([bytearray(frame) for frame in frames])


def octets(view: Any) -> bytes:
    if isinstance(view, torch.Tensor):
        flat = torch.empty(view.numel(), dtype=view.dtype)
        flat.copy_(view.detach().reshape(-1))
        return flat.view(torch.uint8).numpy().tobytes()
    return view.tobytes()


def sharing(values: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """(view, element, view, element) of all elements that begin at one address."""
    first: dict[int, tuple[int, int]] = {}
    found = []
    for number, view in enumerate(leaves(values)):
        for index, address in enumerate(memory_of(view)):
            at = first.setdefault(address, (number, index))
            if at != (number, index):
                found.append((*at, number, index))
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    pairs = list(zip(leaves(before), leaves(after), strict=True))
    for old, new in pairs:
        assert type(old) is type(new)
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert getattr(old, "requires_grad", 0) == getattr(new, "requires_grad", 0)
        assert octets(old) == octets(new)
    assert sharing(before) == sharing(after)


@pytest.mark.parametrize("seed", range(200))
def test_drawn_views_share_what_they_shared(seed: int) -> None:
    values = drawn(random.Random(seed))
    after = sent(values)
    assert_same(values, after)
    assert_same(after, sent(after))


def test_values_that_are_pushed_and_pulled_keep_their_views(
    cluster: Cluster,
) -> None:
    for seed in range(1000, 1015):
        values = drawn(random.Random(seed))
        cluster.push(**values)
        named = ", ".join(f"{name!r}: {name}" for name in values)
        for pulled in cluster["{" + named + "}"]:
            assert_same(values, pulled)
    flat = torch.zeros(2**20)
    cluster.push(flat=flat, head=flat[1:3])  # by a file that the ranks map
    printed = cluster.execute("flat.fill_(rank + 3); print(head.tolist())")
    assert [each.stdout for each in printed] == [
        f"[{rank + 3}.0, {rank + 3}.0]\n" for rank in range(len(printed))
    ]


def size_of(*values: Any) -> int:
    return sum(memoryview(frame).nbytes for frame in serialization.dumps(values))


def test_a_storage_is_sent_once_and_a_part_of_it_alone() -> None:
    base = torch.zeros(1_000_000)
    whole = base.nbytes
    assert whole < size_of(base, base[:10], base.view(1000, 1000).T) < whole + 10_000
    assert size_of(base[:3], base[-3:]) < 10_000
    assert size_of(torch.ones(1).expand(1_000_000)) < 10_000
    assert size_of(base.view(1000, 1000)[:, 0]) < 14_000
    array = np.zeros(1_000_000)
    assert size_of(array[:3], array[::-1][:3]) < 10_000
    linear = torch.nn.Linear(500, 500, bias=False)
    assert size_of(linear.state_dict(), dict(linear.named_parameters())) < 1_010_000


def test_a_storage_that_was_freed_is_an_error() -> None:
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(Unreadable, match=r"0 bytes of the 40 .* was freed"):
        serialization.dumps(tensor)
