"""Hosts that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.network import HostNetwork, why_not

NAMES = ("a", "b", "c", "laptop")


@pytest.fixture(scope="session")
def _network() -> Iterator[HostNetwork]:
    if reason := why_not():
        pytest.skip(reason)
    with HostNetwork(NAMES) as network:
        yield network


@pytest.fixture
def hosts(_network: HostNetwork) -> HostNetwork:
    """The hosts "a", "b", "c" and "laptop", which can reach each other by ssh."""
    _network.ready()
    return _network
