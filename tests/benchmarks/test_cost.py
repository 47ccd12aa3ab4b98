"""The formulas of the cost model, compared with values computed by hand."""

from __future__ import annotations

import pytest

from benchmarks.cost import (
    Costs,
    efficiency,
    fit_messages,
    ring_seconds,
    server_seconds,
)

COSTS = Costs(alpha=5.0, beta=2.0, gamma=1.0)


def test_the_cost_of_a_ring_of_four() -> None:
    # 3 messages of 2 bytes that are added: 3 (5 + 4 + 2); 3 that are not: 3 (5 + 4).
    assert ring_seconds(COSTS, 4, 8) == 60


def test_a_ring_of_one_costs_nothing() -> None:
    assert ring_seconds(COSTS, 1, 8) == 0


def test_a_large_ring_costs_twice_the_bytes_and_its_messages() -> None:
    ranks, nbytes = 512, 512 * 10**6
    bandwidth = 2 * nbytes * COSTS.beta + nbytes * COSTS.gamma
    assert ring_seconds(COSTS, ranks, nbytes) == pytest.approx(
        2 * 511 * COSTS.alpha + 511 / 512 * bandwidth
    )


def test_the_cost_of_a_server_with_three_workers() -> None:
    # Each worker: in 5 + 16, added 8, out 5 + 16.
    assert server_seconds(COSTS, 3, 8) == 150


def test_servers_share_the_bytes_but_not_the_messages() -> None:
    # Each worker and each server: in 5 + 8, added 4, out 5 + 8.
    assert server_seconds(COSTS, 3, 8, servers=2) == 90


def test_messages_on_a_line_are_fitted_exactly() -> None:
    sizes = [16, 1024, 2**24]
    alpha, beta = fit_messages(sizes, [2e-6 + 5e-10 * size for size in sizes])
    assert alpha == pytest.approx(2e-6)
    assert beta == pytest.approx(5e-10)


def test_the_fit_weighs_relative_errors() -> None:
    # Twice 1 byte, in 1 s and in 2 s, and 3 bytes in 2 s. With x = alpha + beta the
    # first two ask for the least (x - 1)^2 + (x/2 - 1)^2: x = 6/5; the last is exact.
    alpha, beta = fit_messages([1, 1, 3], [1.0, 2.0, 2.0])
    assert alpha + beta == pytest.approx(6 / 5)
    assert alpha + 3 * beta == pytest.approx(2)


def test_efficiency_is_the_part_that_computes() -> None:
    assert efficiency(3, 1) == 0.75
    assert efficiency(3, 2, hidden=1) == 0.75
    assert efficiency(3, 1, hidden=2) == 1
