"""Hosts in horovodrun's syntax."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist import Cluster
from nbdist.clusters.hosts.host_list import (
    HostSlots,
    _parse_lines,
    are_here,
    parse_hosts,
    read_hostfile,
)
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
        assert are_here(parse_hosts(f"{name}:3"))
    assert not are_here(parse_hosts("localhost:3,nowhere:2"))


def test_the_slots_limit_the_ranks() -> None:
    assert Cluster(hosts="localhost:3", device="cpu").size == 3
    assert Cluster(2, hosts="localhost:3", device="cpu").size == 2
    with pytest.raises(UsageError, match="-n 4 ranks on the 3 slots of -H localhost:3"):
        Cluster(4, hosts="localhost:3", device="cpu")


def test_a_hostfile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# our servers\nserver1 slots=4\n\nserver2:2  # old\nserver3\n")
    assert read_hostfile(str(path)) == [
        HostSlots("server1", 4),
        HostSlots("server2", 2),
        HostSlots("server3", 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2 max=3\n", "line 1: 'a slots=2 max=3' is not a host and its slots"),
        ("a\nb 4\n", "line 2: 'b 4' is not"),
        ("# nothing\n", "names no host"),
        ("a:1\na:2\n", "names a more than once"),
        ("a:0\n", "'a:0' is not a host and its slots"),
    ],
)
def test_a_malformed_hostfile_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_hostfile(str(path))


HOSTS = st.dictionaries(
    st.from_regex(r"[\w.-]+|\[[0-9a-f:]+\]", fullmatch=True),
    st.integers(1, 99),
    min_size=1,
)


@given(HOSTS, st.sampled_from([",", " , "]))
@settings(max_examples=50)
def test_every_list_is_read_as_it_was_written(
    slots: dict[str, int], comma: str
) -> None:
    hosts = [HostSlots(name, count) for name, count in slots.items()]
    assert parse_hosts(comma.join(f"{h.name}:{h.slots}" for h in hosts)) == hosts
    for form in ("{}:{}", "{} slots={}  # a comment"):
        lines = "\n\n".join(form.format(*each) for each in slots.items())
        assert _parse_lines(lines, "a file") == hosts


def test_a_host_has_a_user_and_a_python() -> None:
    assert parse_hosts(
        "carol@10.0.0.3:2:python=~/env/bin/python,b:python=/p/python"
    ) == [
        HostSlots("carol@10.0.0.3", 2, "~/env/bin/python"),
        HostSlots("b", 1, "/p/python"),
    ]
    assert _parse_lines("carol@b python=~/p slots=3  # hers", "a file") == [
        HostSlots("carol@b", 3, "~/p")
    ]


def test_this_host_as_another_user_is_another_host() -> None:
    own = socket.gethostname()
    assert are_here(parse_hosts(f"{getpass.getuser()}@{own}:3"))
    assert not are_here(parse_hosts(f"nobody-else@{own}:3"))


def test_this_host_has_the_notebooks_python() -> None:
    with pytest.raises(UsageError, match="leave out python="):
        parse_hosts("localhost:2:python=/usr/bin/python3")


@pytest.mark.parametrize("line", ["a slots=2 slots=3", "a slots=x", "a pyton=/p"])
def test_other_columns_are_refused(line: str) -> None:
    with pytest.raises(UsageError, match="is not a host and its slots"):
        _parse_lines(line, "a file")
