"""Each open group has an identity of its own, which is equal on all its members."""

from __future__ import annotations

import random

from nbdist.collectives.group import Group
from tests.collectives.ranks import launch
from tests.seed import SEED

RANKS = 4


def make_and_close(seed: int) -> list[dict[tuple[int, ...], list[tuple[int, int]]]]:
    """Make random groups of one or more ranks, and close some of them.

    Returns:
        After each change, the ranks of each open group of this rank, with the
        identity and the number that it has here, in the order in which they were made.
    """
    from mpi4py import MPI

    draw, world = random.Random(seed), Group(MPI.COMM_WORLD)
    made: list[Group | None] = []
    seen = []
    for _ in range(40):
        if made and draw.random() < 0.3:
            del made[draw.randrange(len(made))]
        else:
            made.append(world.new(draw.sample(range(RANKS), draw.randint(1, RANKS))))
        if draw.random() < 0.1:
            world.renew(world.generation)
        now: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for group in [world, *made]:
            if group is not None:
                now.setdefault(group.ranks, []).append((group.identity, group.number))
        seen.append(now)
    return seen


def test_groups_of_any_ranks_have_identities_of_their_own() -> None:
    of_ranks = launch(RANKS, __file__, "make_and_close", SEED)
    for states in zip(*of_ranks, strict=True):
        of_members: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
        for state in states:
            for members, groups in state.items():
                of_members.setdefault(members, []).append(groups)
        identities = []
        for members, found in of_members.items():
            assert len(found) == len(members), f"NBDIST_SEED={SEED}"
            assert all(groups == found[0] for groups in found), f"NBDIST_SEED={SEED}"
            numbers = [number for _, number in found[0]]
            assert numbers == sorted(numbers), f"NBDIST_SEED={SEED}"
            identities += [identity for identity, _ in found[0]]
        assert len(set(identities)) == len(identities), f"NBDIST_SEED={SEED}"
