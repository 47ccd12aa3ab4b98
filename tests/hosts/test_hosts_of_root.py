"""Root on two hosts, who may limit who connects to the ports of MPI and torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.hosts import traits
from tests.hosts.network import HostNetwork, why_not

START = """
import nbdist
notes = []
cluster = nbdist.Cluster(hosts="a:2,b:2", device="cpu", timeout_s=90)
cluster.on_note = notes.append
cluster.start()
cluster.execute("nbdist.barrier()")
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_only_the_hosts_of_the_ranks_can_connect():
    names = ("a", "b", "c")
    of_root = replace(traits.equal(1)[0], user="root", uid=0, gid=0, home=Path("/root"))
    with HostNetwork(names, [of_root] * 3) as network:
        a, b, c = (network[name] for name in names)
        with a.console() as console:
            console.do(START)
            assert console.value("notes") == []
            for host, other in ((a, b), (b, a)):
                address, ports = host.addresses[0], host.open_ports()
                assert other.reached(address, ports)
                assert c.reached(address, ports) == []
            console.do("cluster.stop()")
