"""Hosts that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import traits
from tests.hosts.network import HostNetwork, why_not
from tests.seed import SEED

NAMES = ("a", "b", "c", "laptop")


@pytest.fixture(scope="module")
def _network(request: pytest.FixtureRequest) -> Iterator[HostNetwork]:
    """The hosts of a module: unlike each other; with `ONE_USER`, those of a site."""
    if reason := why_not():
        pytest.skip(reason)
    one_user = getattr(request.module, "ONE_USER", False)
    draw = traits.of_one_user if one_user else traits.drawn
    chosen = draw(f"{SEED} {request.module.__name__}", len(NAMES))
    for name, has in zip(NAMES, chosen, strict=True):
        print(f"host {name}: {has}")
    with HostNetwork(NAMES, chosen) as network:
        yield network


@pytest.fixture
def hosts(_network: HostNetwork) -> HostNetwork:
    """The hosts "a", "b", "c" and "laptop", which can reach each other by ssh."""
    _network.ready()
    return _network
