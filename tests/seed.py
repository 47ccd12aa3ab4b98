"""The seed of what the tests draw at random. A test that fails prints it.

`NBDIST_SEED=1234 pytest FILE` repeats the draws.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterator
from typing import TypeVar

import pytest

__all__ = ["CHOSEN", "SEED", "drawn", "some_or_all"]

T = TypeVar("T")

CHOSEN = "NBDIST_SEED" in os.environ
SEED = int(os.environ.get("NBDIST_SEED") or random.SystemRandom().randrange(10**8))


def some_or_all(some: int) -> pytest.MarkDecorator:
    """Run a test on `some` drawn cases, and as a long test on all of them.

    The test has the argument `most`, for `drawn`.
    """
    everything = pytest.param(None, marks=pytest.mark.slow, id="all")
    return pytest.mark.parametrize("most", [some, everything])


def drawn(cases: Collection[T], most: int | None) -> Iterator[T]:
    """At most so many of the cases, in an order that is drawn. Each is printed."""
    chosen = random.Random(SEED).sample(list(cases), most or len(cases))
    for case in chosen:
        print("case", case)
        yield case
