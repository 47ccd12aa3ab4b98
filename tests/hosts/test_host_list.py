"""Hosts in horovodrun's syntax."""

from __future__ import annotations

import socket

import pytest

from nbdist import Cluster
from nbdist.clusters.hosts.host_list import HostSlots, parse_hosts, slots_here
from nbdist.errors import UsageError


def test_hosts_and_slots_are_parsed() -> None:
    assert parse_hosts("server1:4, server2.lan:2,10.0.0.3") == [
        HostSlots("server1", 4),
        HostSlots("server2.lan", 2),
        HostSlots("10.0.0.3", 1),
    ]


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", "a b:2", "a:2,,b:2", ":4"])
def test_texts_that_are_not_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected such as localhost:4"):
        parse_hosts(text)


def test_a_host_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="names a more than once"):
        parse_hosts("a:2,b:1,a:2")


def test_this_host_has_several_names() -> None:
    own = socket.gethostname()
    for name in ("localhost", "127.0.0.1", own, f"{own}.example.org"):
        assert slots_here(parse_hosts(f"{name}:3")) == 3


def test_other_hosts_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"^-H nowhere: .*other hosts.*localhost:2"):
        Cluster(hosts="localhost:2,nowhere:2")


def test_the_slots_limit_the_ranks() -> None:
    assert Cluster(hosts="localhost:3", device="cpu").size == 3
    assert Cluster(2, hosts="localhost:3", device="cpu").size == 2
    with pytest.raises(UsageError, match="-n 4 ranks on the 3 slots of -H localhost:3"):
        Cluster(4, hosts="localhost:3", device="cpu")
