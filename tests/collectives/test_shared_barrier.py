"""The barrier in shared memory, if a rank leaves while another one is late."""

from __future__ import annotations

from types import ModuleType

import pytest

from nbdist.collectives.sync.semaphore_barrier import NAP_S, YIELDS
from nbdist.collectives.sync.shared_barrier import SharedBarrier
from nbdist.collectives.sync.shared_segment import Segment
from nbdist.collectives.transports.native import find_compiled
from nbdist.errors import CollectiveAborted

SIZE = 3
KINDS = [None] if find_compiled() is None else [find_compiled(), None]
FINGERPRINT = 12345


def never() -> None:
    """A `check` that never ends the wait."""


@pytest.fixture(params=KINDS, ids=lambda kind: "compiled" if kind else "in Python")
def barriers(request: pytest.FixtureRequest) -> list[SharedBarrier]:
    """A barrier for each rank, all in this process."""
    native: ModuleType | None = request.param
    head = -(-SharedBarrier.bytes_needed(SIZE) // 64) * 64
    segment = Segment.create(head)
    made = [
        SharedBarrier(
            memoryview(segment.memory)[:head],
            rank,
            SIZE,
            0,
            never,
            None
            if native is None
            else native.Barrier(
                segment.descriptor,
                rank,
                SIZE,
                slots_at=head,
                slot_bytes=0,
                spins=0,
                yields=YIELDS,
                nap_s=NAP_S,
            ),
        )
        for rank in range(SIZE)
    ]
    for each in made:
        each.prepare()
    return made


def test_a_rank_that_leaves_after_a_step_lets_the_others_pass_that_step(
    barriers: list[SharedBarrier],
) -> None:
    first, second, last = barriers
    assert first.semaphores.arrive(FINGERPRINT) is None  # the others are late
    assert second.semaphores.arrive(FINGERPRINT) is None
    assert last.arrive(FINGERPRINT, never)
    assert last.semaphores.arrive(FINGERPRINT) is None  # in its next call, alone
    last.leave("it was closed")
    assert second.wait(never, second.semaphores.resume)
    second.leave("it was closed as well")
    assert first.wait(never, first.semaphores.resume)
    with pytest.raises(CollectiveAborted, match="rank 2 of the group left it: it was"):
        first.arrive(FINGERPRINT, never)


def test_a_rank_that_leaves_in_a_step_keeps_the_others_from_passing_it(
    barriers: list[SharedBarrier],
) -> None:
    first, second, last = barriers
    assert last.semaphores.arrive(FINGERPRINT) is None
    last.leave("out of time")
    for each in (first, second):
        with pytest.raises(CollectiveAborted, match="rank 2 of the group left it: out"):
            each.arrive(FINGERPRINT, never)
