"""The cores and memory of a process in a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbdist.ipc.resources import cores, memory_available, memory_limit


@pytest.mark.parametrize(
    ("written", "limit"), [("max\n", 1000), ("400\n", 400), ("9000\n", 1000)]
)
def test_the_memory_limit_of_a_container_counts(
    tmp_path: Path, written: str, limit: int
) -> None:
    file = tmp_path / "memory.max"
    file.write_text(written)
    assert memory_limit(1000, file) == limit
    assert memory_limit(1000, tmp_path / "absent") == 1000


@pytest.mark.parametrize(
    ("limit", "current", "available"),
    [("max", "300", 500), ("400", "300", 130), ("400", "500", 0), ("9000", "1", 500)],
)
def test_the_available_memory_of_a_container(
    tmp_path: Path, limit: str, current: str, available: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert memory_available(1000, 500, tmp_path) == (400 if limit == "400" else 500)
    (tmp_path / "memory.current").write_text(f"{current}\n")
    (tmp_path / "memory.stat").write_text("anon 9\ninactive_file 20\nactive_file 10\n")
    assert memory_available(1000, 500, tmp_path) == available


@pytest.mark.parametrize(
    ("written", "expected"),
    [("max 100000\n", 6), ("200000 100000\n", 2), ("50000 100000\n", 1), ("x\n", 6)],
)
def test_the_cpu_quota_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(6)))
    file = tmp_path / "cpu.max"
    file.write_text(written)
    assert cores(file) == expected
    assert cores(tmp_path / "absent") == 6
