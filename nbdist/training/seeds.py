"""Random numbers that are alike on all ranks where they must be, and else differ."""

from __future__ import annotations

import operator
import random
from types import TracebackType

import numpy as np
import torch

from nbdist.errors import UsageError
from nbdist.training.data.sampler import place_in

__all__ = ["Seeds", "seed_all"]


class Seeds:
    """The ranks' random numbers, alike until `split`; `nbdist.seed_all` makes one.

    As a context manager it splits at the end.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        _seed(seed, seed, seed)

    def split(self) -> None:
        """Give this rank random numbers of its own, from here on.

        They depend on the seed and the rank alone: not on what was drawn before, nor on
        how many ranks there are. Any rank may call, alone too.
        """
        rank, _size = place_in(None)
        own = np.random.SeedSequence(self.seed, spawn_key=(rank,))
        _seed(*(int(word) for word in own.generate_state(3, np.uint64)))

    def __enter__(self) -> Seeds:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.split()


def seed_all(seed: int) -> Seeds:
    """Seed Python's, numpy's and torch's random numbers, on the CPU and all GPUs.

    At first all ranks draw the same ones, so that each makes the same model; then each
    should draw its own, or all would drop the same units and crop alike::

        with nbdist.seed_all(0):
            model = Net()  # equal on all ranks
        # from here on, each rank's own

    Without `with`, the ranks stay alike until `split()` of what this returns. In the
    part that is alike, the numbers are those of `torch.manual_seed(seed)`.

    Args:
        seed: 0 or more; the same on all ranks.

    Raises:
        UsageError: the seed is not such a number.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise UsageError(f"seed={seed!r}: expected a whole number, 0 or more")
    return Seeds(number)


def _seed(for_python: int, for_numpy: int, for_torch: int) -> None:
    random.seed(for_python)
    np.random.seed(for_numpy % 2**32)  # all that its global generator takes
    torch.manual_seed(for_torch)
