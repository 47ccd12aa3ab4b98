"""Every sample goes to exactly one rank in each epoch, in worlds of any size."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import UsageError
from nbdist.training.data.sampler import Sampler, epoch_order, share_of

SIZES = st.integers(1, 8)
LENGTHS = st.integers(0, 120)
BATCHES = st.integers(1, 40)


def world(size: int, length: int, batch_size: int, **options) -> list[Sampler]:
    """The samplers of all ranks of a world."""
    groups = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    return [Sampler(length, batch_size, group=group, **options) for group in groups]


def hand_out(samplers: list[Sampler], batches: int | None = None) -> list[list[int]]:
    """Take global batches on all ranks. Returns the joined parts of the ranks."""
    steps = zip(*(iter(sampler) for sampler in samplers), strict=True)
    taken = []
    for parts in itertools.islice(steps, batches):
        sizes = [len(part) for part in parts]
        assert sum(sizes) == samplers[0].next_size
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        taken.append([index for part in parts for index in part])
        for sampler in samplers:
            sampler.advance()
    return taken


@given(SIZES, LENGTHS, BATCHES, st.booleans(), st.integers(0, 3))
def test_every_sample_is_taken_once(size, length, batch_size, shuffle, seed):
    samplers = world(size, length, batch_size, shuffle=shuffle, seed=seed)
    batches = hand_out(samplers)
    assert sorted(itertools.chain(*batches)) == list(range(length))
    assert len(batches) == len(samplers[0])
    assert {sampler.position for sampler in samplers} == {length}
    assert samplers[0].next_size == 0


@given(SIZES, SIZES, LENGTHS, BATCHES, st.integers(0, 10))
def test_every_sample_is_taken_once_after_a_resize(
    before, after, length, batch_size, taken
):
    samplers = world(before, length, batch_size)
    first = hand_out(samplers, taken)
    resized = world(after, length, batch_size, seed=9)
    for sampler in resized:
        sampler.load_state_dict(samplers[0].state_dict())
    assert hand_out(world(1, length, batch_size)) == first + hand_out(resized)


@given(SIZES, LENGTHS, BATCHES)
def test_drop_last_leaves_out_less_than_a_batch(size, length, batch_size):
    samplers = world(size, length, batch_size, drop_last=True)
    batches = hand_out(samplers)
    assert all(len(batch) == batch_size for batch in batches)
    assert len(batches) == length // batch_size == len(samplers[0])
    assert len(set(itertools.chain(*batches))) == len(batches) * batch_size


@given(st.integers(0, 60), st.integers(0, 5), st.integers(0, 5))
def test_the_order_depends_only_on_seed_and_epoch(length, seed, epoch):
    order = epoch_order(length, seed, epoch, shuffle=True)
    assert order.tolist() == epoch_order(length, seed, epoch, shuffle=True).tolist()
    assert sorted(order) == list(range(length))


def test_other_seeds_and_epochs_give_other_orders():
    orders = {
        tuple(epoch_order(50, seed, epoch, shuffle=True))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16
    assert epoch_order(5, 3, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@given(LENGTHS, SIZES)
def test_parts_of_a_batch_are_consecutive(length, size):
    shares = [share_of(length, rank, size) for rank in range(size)]
    assert shares[0].start == 0
    assert shares[-1].stop == length
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))


def test_prefetching_does_not_move_the_position():
    sampler = Sampler(10, 4, shuffle=False)
    ahead = iter(sampler)
    assert next(ahead) == [0, 1, 2, 3]
    next(ahead)
    assert sampler.position == 0
    sampler.advance()
    assert next(iter(sampler)) == [4, 5, 6, 7]


def test_an_epoch_continues_if_it_has_begun():
    sampler = Sampler(10, 4)
    sampler.advance()
    sampler.set_epoch(0)
    assert sampler.position == 4
    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.position) == (2, 0)
    sampler.end_epoch()
    assert sampler.epoch == 3


@pytest.mark.parametrize(
    "arguments", [(-1, 4), (10, 0), (10, 2.5), ("ten", True), (10, "4")]
)
def test_invalid_numbers_are_refused(arguments):
    with pytest.raises(UsageError, match=r"expected a whole number, [01] or more"):
        Sampler(*arguments)


def test_a_state_of_another_data_set_is_refused():
    state = Sampler(10, 4).state_dict()
    with pytest.raises(UsageError, match="that of 10 samples, and the data set has 11"):
        Sampler(11, 4).load_state_dict(state)
