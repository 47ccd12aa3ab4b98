"""The history of collectives: alignment, and the call in which the ranks parted."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.clusters.collective_history import CollectiveHistory
from nbdist.ipc.flight_record import FlightRecord, RecordedCall

NOW_NS = 60 * 10**9
KIND = {"operation": "all_reduce", "reduce_op": "sum", "shape": "(4,)"}


class Script:
    """The flight records of some ranks, call by call."""

    def __init__(self, ranks: int) -> None:
        self.calls: dict[str, list[RecordedCall]] = {}
        for rank in range(ranks):
            self.calls[f"rank{rank}"] = []
        self.wrapped: set[str] = set()
        self.torn: dict[str, int] = {}
        self._time_ns = 10**9

    def add(self, name: str, sequence: int, state: str = "done", **given: Any) -> None:
        """Add a call, made a millisecond after the last one."""
        self._time_ns += 10**6
        rank = int(name.removeprefix("rank").partition("-")[0])
        mine = self.calls.setdefault(name, [])
        values: dict[str, Any] = {
            "ticket": len(mine) + 1,
            "group": 0,
            "generation": 0,
            "rank": rank,
            "members": tuple(range(4)),
            "sequence": sequence,
            "root": None,
            "dtype": "float32",
            "device": "cpu",
            "fingerprint": 0,
            "scheduled_ns": self._time_ns,
            "started_ns": self._time_ns,
            "ended_ns": self._time_ns + 5000 if state in ("done", "failed") else 0,
            "cell": 7,
            "line": sequence,
        }
        mine.append(RecordedCall(state=state, **(values | KIND | given)))

    def everyone(self, sequence: int, state: str = "done", **given: Any) -> None:
        """Add the same call of all ranks."""
        for name in list(self.calls):
            self.add(name, sequence, state, **given)

    def history(self, *ended: str, **options: Any) -> CollectiveHistory:
        records = []
        for name, calls in self.calls.items():
            rank, _, joined = name.removeprefix("rank").partition("-")
            records.append(
                FlightRecord(
                    name=name,
                    joined=(int(rank), int(joined or 0)),
                    pid=1,
                    clock_offset_ns=0,
                    calls=tuple(calls),
                    torn=self.torn.get(name, 0),
                    has_wrapped=name in self.wrapped,
                )
            )
        return CollectiveHistory(records, ended, NOW_NS, **options)


@pytest.fixture
def script() -> Script:
    return Script(4)


def test_nothing_was_called(script: Script) -> None:
    history = script.history()
    assert repr(history) == "no rank has made a collective or sent a message"
    assert history.summary in history._repr_html_()


def test_calls_are_aligned_by_their_number(script: Script) -> None:
    script.everyone(1)
    script.everyone(2, operation="barrier", dtype="object", reduce_op="")
    history = script.history()
    assert history.summary == "the ranks agree in all recorded calls"
    first, second = history.rows
    assert set(first.calls) == set(second.calls) == {0, 1, 2, 3}
    assert (first.name, first.location) == ("all_reduce #1", "In[7] line 1")
    lines = repr(history).splitlines()
    assert [head.strip() for head in lines[1].split("  ") if head.strip()] == [
        "call", "operation", "at", "rank 0", "rank 1", "rank 2", "rank 3",
    ]  # fmt: skip
    assert lines[3].count("done 5 µs") == 4
    assert lines[4].startswith("#2    barrier()")


def test_a_rank_that_has_not_come(script: Script) -> None:
    script.everyone(1)
    for name in ("rank0", "rank1", "rank3"):
        script.add(name, 2, "running")
    history = script.history()
    assert history.parted is history.rows[1]
    assert history.parted.missing == (2,)
    assert history.summary == (
        "the ranks parted at all_reduce #2 (In[7] line 2): rank 2 has not come (its "
        "last call is all_reduce #1 at In[7] line 1, done 59.0 s ago); ranks 0-1,3 "
        "wait 59.0 s"
    )
    assert "not come" in repr(history)


def test_a_rank_that_waits_elsewhere(script: Script) -> None:
    for name in ("rank0", "rank1", "rank3"):
        script.add(name, 1, "running")
    script.add("rank2", 1, "running", group=1, members=(1, 2), operation="broadcast")
    history = script.history()
    assert [row.missing for row in history.rows] == [(2,), (1,)]
    assert "its last call is broadcast #1 of group 1-2" in history.summary
    assert history.parted is history.rows[0]


def test_ranks_that_have_come_are_not_missing_in_a_call_that_is_done(
    script: Script,
) -> None:
    """Their entries were read before they had begun the call."""
    script.everyone(1)
    script.add("rank0", 2)
    script.add("rank1", 2, "running")
    history = script.history()
    assert history.rows[1].missing == ()
    assert history.parted is None


def test_a_call_that_was_overwritten_is_not_missing(script: Script) -> None:
    script.add("rank0", 1, "failed")
    for name in ("rank1", "rank2", "rank3"):
        script.add(name, 9, group=3)
        script.wrapped.add(name)
    assert script.history().rows[0].missing == ()
    script.wrapped.clear()
    assert script.history().rows[0].missing == (1, 2, 3)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    "different",
    [{"operation": "broadcast"}, {"shape": "(5,)"}, {"dtype": "int64"}, {"root": 1}],
)
def test_a_rank_that_calls_something_else(
    script: Script, rank: int, different: dict[str, Any]
) -> None:
    script.everyone(1)
    for each in range(4):
        given = different | {"line": 9} if each == rank else {}
        script.add(f"rank{each}", 2, "failed", **given)
    history = script.history()
    assert history.parted is history.rows[1]
    others = {0: "1-3", 1: "0,2-3", 2: "0-1,3", 3: "0-2"}[rank]
    other = history.rows[1].calls[rank].description
    assert history.summary == (
        f"the ranks parted at call #2: ranks {others} called all_reduce(sum, float32, "
        f"(4,)) at In[7] line 2; rank {rank} called {other} at In[7] line 9"
    )
    assert f"{other} failed 5 µs" in repr(history)


def test_ranks_that_agree_again_have_not_parted(script: Script) -> None:
    script.add("rank0", 1, "failed", shape="(5,)")
    for name in ("rank1", "rank2", "rank3"):
        script.add(name, 1, "failed")
    assert script.history().parted is not None
    script.everyone(2)
    assert script.history().parted is None
    script.everyone(3, "failed")
    assert script.history().summary == (
        "all_reduce #3 (In[7] line 3) was not completed: ranks 0-3 failed after 5 µs"
    )


@pytest.mark.parametrize(
    "later",
    [{"group": 1}, {"generation": 1}, {"generation": 1, "members": (0, 1, 2)}],
    ids=["another group", "another generation", "a smaller world"],
)
def test_ranks_that_go_on_elsewhere_have_agreed_again(
    script: Script, later: dict[str, Any]
) -> None:
    for name in ("rank0", "rank1", "rank2"):
        script.add(name, 1, "failed")
    assert script.history().parted is not None
    script.everyone(1, **later)
    assert script.history().summary == (
        "the ranks have agreed again since they parted at all_reduce #1 (In[7] line 1)"
    )


def test_ranks_that_agree_elsewhere_and_still_wait_have_parted(script: Script) -> None:
    for name in ("rank0", "rank1", "rank2"):
        script.add(name, 1, "running")
    script.everyone(1, group=1)
    parted = script.history().parted
    assert parted is not None
    assert parted.missing == (3,)


def test_nothing_of_a_former_world_is_waited_for(script: Script) -> None:
    """A call that was abandoned may have no end in its record."""
    script.add("rank2", 14, "running", group=4096)
    assert script.history().parted is not None
    script.everyone(1, generation=1)
    assert script.history().parted is None


def test_an_agreement_of_other_ranks_does_not_count(script: Script) -> None:
    for name in ("rank0", "rank1", "rank2"):
        script.add(name, 1, "failed")
    for name in ("rank0", "rank1"):
        script.add(name, 1, group=1, members=(0, 1))
    assert script.history().parted is not None


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_that_died_before_the_call(script: Script, rank: int) -> None:
    script.everyone(1)
    for each in {0, 1, 2, 3} - {rank}:
        script.add(f"rank{each}", 2, "failed")
    script.calls[f"rank{rank}-1"] = []
    history = script.history(f"rank{rank}")
    assert history.summary.startswith(
        f"the ranks parted at all_reduce #2 (In[7] line 2): rank {rank} died and had "
        "not come (its last call is all_reduce #1"
    )


def test_a_rank_that_died_in_the_call(script: Script) -> None:
    for name in ("rank0", "rank1", "rank3"):
        script.add(name, 1, "failed")
    script.add("rank2", 1, "running")
    script.torn["rank2"] = 1
    history = script.history("rank2")
    assert history.summary == (
        "all_reduce #1 (In[7] line 1) was not completed: rank 2 died in it; ranks "
        "0-1,3 failed after 5 µs"
    )
    assert "died in it" in repr(history.table)
    assert "rank2 ended while it wrote the record of 1 more call" in history.notes
    script.torn = {"rank1": 1}  # a living rank completes it
    assert "ended while" not in script.history("rank2").notes


def test_the_calls_of_a_replaced_rank_are_in_its_column(script: Script) -> None:
    script.everyone(5)
    for name in ("rank0", "rank1", "rank3", "rank2-1"):
        script.add(name, 1, generation=1, group=1)
    history = script.history("rank2")
    assert [set(row.calls) for row in history.rows] == [{0, 1, 2, 3}] * 2
    text = repr(history)
    assert "0-3, generation 0  #5" in text
    assert "0-3, generation 1  #1" in text


def test_a_rank_with_another_number_since(script: Script) -> None:
    """After rank 1 has left, rank 2 is rank 1."""
    script.everyone(1)
    for name, rank in (("rank0", 0), ("rank2", 1)):
        given = {"generation": 1, "group": 1, "members": (0, 1, 2), "rank": rank}
        script.add(name, 1, "running", **given)
    row = script.history("rank1").rows[1]
    assert set(row.calls) == {0, 1}
    assert row.missing == (2,)


def test_scheduled_calls_are_numbered_after_those_that_have_begun(
    script: Script,
) -> None:
    script.add("rank0", 8, "running")
    script.add("rank0", 0, "scheduled")
    script.add("rank0", 0, "scheduled")
    assert [row.sequence for row in script.history().rows] == [8, 9, 10]


def test_the_two_sides_of_a_message_share_a_row(script: Script) -> None:
    script.add("rank0", 1, operation="send", root=2, reduce_op="")
    script.add("rank2", 1, operation="recv", root=0, reduce_op="")
    script.add("rank3", 4, "running", operation="recv", root=1, reduce_op="")
    script.add("rank3", 1, "running", operation="recv", root=None, reduce_op="")
    history = script.history()
    assert [set(row.calls) for row in history.rows] == [{0, 2}, {3}, {3}]
    assert history.rows[0].members == (0, 2)
    assert history.parted is None
    assert history.summary == "rank 3 is in recv(from=1, float32, (4,)) for 59.0 s"


def test_the_rows_and_ranks_that_are_shown(script: Script) -> None:
    for name in ("rank0", "rank1", "rank2"):
        script.add(name, 1, "running", group=1)
    for sequence in range(1, 31):
        script.everyone(sequence)
    history = script.history(count=3, ranks=[1, 3])
    lines = repr(history).splitlines()
    assert "rank 3 has not come" in lines[0]
    heads = [head.strip() for head in lines[1].split("  ") if head.strip()]
    assert heads[-2:] == ["rank 1", "rank 3"]
    assert "rank 0" not in lines[1]
    calls = [line.split("#")[1].split()[0] for line in lines[3:6]]
    assert calls == ["1", "29", "30"]  # the one in which they parted comes first
    assert lines[6] == "28 more recorded calls: -n 31"


def test_a_rank_without_a_record(script: Script) -> None:
    script.add("rank0", 1, "running")
    del script.calls["rank3"]
    history = script.history()
    assert history.rows[0].missing == (1, 2)
    assert "rank 1-3 has no recorded call" in history.notes


def test_html_is_escaped(script: Script) -> None:
    script.add("rank0", 1, operation="<b>")
    assert "&lt;b&gt;" in script.history()._repr_html_()
    assert "<b>" not in script.history()._repr_html_()
