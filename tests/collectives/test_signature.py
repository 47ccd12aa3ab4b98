"""Signatures are equal in all processes, and the tables of calls show the calls."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nbdist.collectives import signature
from nbdist.collectives.call import Call, describe_mismatch, describe_timeout
from nbdist.wire import CollectiveCall

BASE = ("all_reduce", "sum", None, torch.float32, (3, 4), "cpu")


def test_calls_have_equal_signatures_if_they_are_equal() -> None:
    fingerprint = signature(*BASE).fingerprint
    assert signature(*BASE) is signature(*BASE)
    changes = ["broadcast", "max", 1, torch.float64, (4, 3), "cuda"]
    for position, change in enumerate(changes):
        other = (*BASE[:position], change, *BASE[position + 1 :])
        assert signature(*other).fingerprint != fingerprint


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "import torch; from nbdist.collectives import signature as s;"
        "print(s('all_reduce', 'sum', None, torch.float32, (3, 4), 'cpu').fingerprint)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) == signature(*BASE).fingerprint


def call(rank: int, shape: tuple[int, ...], cell: int | None) -> CollectiveCall:
    return CollectiveCall(
        rank, 7, "all_reduce", "sum", None, "float32", shape, "cpu", cell, 4
    )


def test_the_mismatch_table_has_a_line_for_each_rank() -> None:
    lines = describe_mismatch([call(0, (3,), 5), call(1, (30, 40), None)]).split("\n")
    assert lines[1].split() == [
        "rank", "call", "operation", "op", "root", "shape", "dtype", "device", "at",
    ]  # fmt: skip
    assert "(3,)" in lines[2]
    assert lines[2].endswith("In[5] line 4")
    assert "(30, 40)" in lines[3]
    assert lines[3].endswith("cpu     line 4")


@pytest.mark.parametrize("notes", [{}, {0: "", 2: "rank 2: #3 barrier", 3: ""}])
def test_the_timeout_names_the_missing_ranks(notes: dict[int, str]) -> None:
    text = describe_timeout(call(0, (3,), 5), [0, 2, 3], [2, 3], notes)
    assert "Arrived: rank 0. Missing: ranks 2, 3." in text
    assert ("rank 2: #3 barrier (it waits there)" in text) == bool(notes)
    assert ("Not in any collective: rank 3." in text) == bool(notes)


def test_a_call_records_the_line_of_its_caller() -> None:
    record = Call(signature(*BASE)).record(rank=1)
    assert (
        record.line
        == test_a_call_records_the_line_of_its_caller.__code__.co_firstlineno + 1
    )
    assert record.cell is None
