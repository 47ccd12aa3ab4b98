"""Seeds random numbers: equal on all ranks until a split, different after it."""

from __future__ import annotations

import operator
import random
from types import TracebackType

import numpy as np
import torch

from nbdist.errors import UsageError
from nbdist.training.data.sampler import rank_and_size

__all__ = ["Seeds", "seed_all"]


class Seeds:
    """Random numbers that are equal on all ranks until `split`.

    `nbdist.seed_all` makes this object. As a context manager it splits at the end.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        _seed(seed, seed, seed)

    def split(self) -> None:
        """Seed this rank's random numbers differently from all other ranks'.

        The new numbers depend only on the seed and the rank. The numbers drawn before
        and the number of ranks have no effect. Any rank may call it alone.
        """
        rank, _size = rank_and_size(None)
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

    Within the `with` block all ranks draw equal numbers, so that all make the same
    model. After it each rank draws its own, so that ranks differ in dropout and in
    augmentation::

        with nbdist.seed_all(0):
            model = Net()  # equal on all ranks
        # different numbers on each rank from here on

    Without `with`, ranks draw equal numbers until `split()` of the result is called.
    These numbers are those of `torch.manual_seed(seed)`.

    Args:
        seed: 0 or more; the same on all ranks.

    Returns:
        The context manager.

    Raises:
        UsageError: the seed is not a whole number, or it is negative.
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
    np.random.seed(for_numpy % 2**32)  # the global generator takes 32 bits
    torch.manual_seed(for_torch)
