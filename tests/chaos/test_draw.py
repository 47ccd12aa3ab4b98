"""Draws and their expectations, without a cluster."""

from __future__ import annotations

from itertools import product

from tests.chaos.draw import CHANGES, FAULTS, MOMENTS, RANKS, draw, possible, spread
from tests.chaos.expectations import ENDED, TABLE, WHOLE, expected
from tests.chaos.test_chaos import OFTEN, SOAK

MANY = [draw(seed) for seed in range(5000)]


def test_a_seed_always_draws_the_same() -> None:
    assert [draw(seed) for seed in range(100)] == MANY[:100]
    assert str(draw(1)).startswith("1: ")


def test_every_combination_is_drawn() -> None:
    drawn = {(each.process, each.fault, each.moment) for each in MANY}
    assert drawn == {
        (process, fault, moment)
        for process, faults in FAULTS.items()
        for fault, moment in product(faults, MOMENTS)
        if possible(process, fault, moment)
    }


def test_victims_are_ranks_of_the_cluster() -> None:
    for each in MANY:
        most = RANKS + 1 if each.moment == "scale" else RANKS
        assert set(each.victims) <= set(range(most))
        assert bool(each.victims) == (each.process in ("rank", "rank parent", "worker"))
        assert bool(each.stage) == (each.moment in (*CHANGES, "start"))


def test_every_draw_has_an_expectation_and_every_row_a_draw() -> None:
    rows = [next(row for row in TABLE if row.fits(each)) for each in MANY]
    assert set(rows) == set(TABLE)
    for each in MANY:
        wanted = expected(each)
        assert wanted.ends
        assert not [text for text in wanted.says if "{" in text.replace("{2}", "")]


def test_a_process_that_is_stopped_and_continued_costs_no_rank() -> None:
    for each in MANY:
        if each.fault == "SIGSTOP" and each.moment == "cell" and each.victims:
            assert expected(each).ends == (WHOLE,)
            assert expected(each).new == ()


def test_the_seeds_of_each_run_cover_the_cases() -> None:
    """Each pair of process and fault, and each moment; as many moments as can be."""
    drawn = [draw(seed) for seed in OFTEN]
    assert {(d.process, d.fault) for d in drawn} == {
        (process, fault) for process, faults in FAULTS.items() for fault in faults
    }
    assert {d.moment for d in drawn} == set(MOMENTS)
    assert len(drawn) == 20
    assert len(SOAK) == 300


def test_spread_chooses_new_cases_first() -> None:
    chosen = spread(range(200), 3)
    assert len({(draw(seed).process, draw(seed).fault) for seed in chosen}) == 3
    assert len({draw(seed).moment for seed in chosen}) == 3


def test_the_ranks_that_a_recovery_replaces() -> None:
    each = next(
        d for d in MANY if d.moment == "recovery" and d.process == "process supervisor"
    )
    assert each.first in expected(each).new
    started = next(d for d in MANY if d.moment == "start" and d.process == "mpiexec")
    if started.fault == "SIGKILL":
        assert expected(started).ends == (ENDED,)
