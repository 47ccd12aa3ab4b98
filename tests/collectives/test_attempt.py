"""An attempt of several ranks ends on all of them, also if one fails or waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from ranks import launch


def attempt_as(failing: int | None) -> tuple[str, dict[int, str]]:
    """Attempt something that takes for ever on the ranks that do not fail."""
    from mpi4py import MPI

    from nbdist.collectives.sync.attempt import attempt

    comm = MPI.COMM_WORLD

    def work() -> None:
        if comm.rank == failing:
            raise ValueError("odd")
        if failing is not None:
            threading.Event().wait()

    try:
        return "", attempt(work, comm, range(comm.size), 7, lambda: None)
    except ValueError as error:
        return str(error), {}


def attempt_until_released() -> str:
    """Rank 0 waits for ever, and is released. The other ranks succeed, and wait."""
    from mpi4py import MPI

    from nbdist.collectives.sync.attempt import attempt

    comm = MPI.COMM_WORLD
    release = threading.Event()
    threading.Timer(0.5, release.set).start()

    def check() -> None:
        if release.is_set():
            raise TimeoutError("released")

    work: Callable[[], object] = threading.Event().wait if comm.rank == 0 else print
    with pytest.raises(TimeoutError) as ended:
        attempt(work, comm, range(comm.size), 7, check)
    return str(ended.value)


@pytest.mark.parametrize("size", [1, 3])
def test_an_attempt_that_succeeds(size: int) -> None:
    assert launch(size, __file__, "attempt_as", None) == [("", {})] * size


def test_a_failure_ends_the_attempt_of_all_ranks() -> None:
    told = "", {1: "ValueError: odd"}
    assert launch(3, __file__, "attempt_as", 1) == [told, ("odd", {}), told]


def test_an_attempt_is_released() -> None:
    said = launch(3, __file__, "attempt_until_released")
    assert said == ["released"] * 3
