"""The search of a cell's long text, in the file that has all lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.widgets import long_search
from nbdist.widgets.long_search import MOST_SHOWN, LongSearch, search
from nbdist.widgets.long_text import LongText


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cell-1.txt"
    lines = [f"[{rank}] step {step}" for step in range(3000) for rank in range(2)]
    lines += ["[0-1] \x1b[31mWarn\x1b[0ming: <b>", "[0,2-3] step done"]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def displays(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What is displayed, by display id."""
    shown: dict[str, Any] = {}

    def show(data: Any, *, display_id: str, **_rest: object) -> None:
        shown[display_id] = data

    monkeypatch.setattr(long_search, "display", show)
    monkeypatch.setattr(long_search, "update_display", show)
    return shown


def test_all_lines_are_searched_and_counted_per_rank(path: Path):
    found = search(path, "step 2999")
    assert found.lines == [(5999, "[0] step 2999"), (6000, "[1] step 2999")]
    assert found.counts == {"0": 1, "1": 1}
    assert (found.searched, found.is_whole) == (6002, True)
    assert search(path, "DONE").counts == {"0,2-3": 1}


def test_ranks_and_colours_are_no_part_of_a_line(path: Path):
    assert search(path, "[0]").lines == []
    assert search(path, "warning").lines == [(6001, "[0-1] Warning: <b>")]


def test_the_first_lines_of_many_are_kept(path: Path):
    found = search(path, "step")
    assert len(found.lines) == MOST_SHOWN
    assert sum(found.counts.values()) == 6001


def test_a_search_of_a_huge_file_ends_with_its_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(long_search, "CHECK_LINES", 100)
    found = search(path, "step", limit_s=0.0)
    assert (found.searched, found.is_whole) == (100, False)


def test_the_field_shows_what_was_found(path: Path, displays: dict[str, Any]):
    field = LongSearch("field", path)
    field.show()
    assert displays["field"].keys() >= {"application/vnd.jupyter.widget-view+json"}
    field._field.value = "step 2999"
    page = field._result.value
    assert "2 of 6,002 lines: [0] 1, [1] 1" in page
    assert "<mark>step 2999</mark>" in page
    field._field.value = "warning: <B>"
    assert "1 of 6,002 lines<" in field._result.value
    assert "<mark>Warning: &lt;b&gt;</mark>" in field._result.value
    field._field.value = "nowhere"
    assert "0 of 6,002 lines" in field._result.value
    assert "<pre" not in field._result.value
    path.unlink()
    field._field.value = "other"
    assert "not searched: No such file" in field._result.value
    field.close()
    assert not any(displays["field"].values())


def test_a_file_that_cannot_be_written_has_no_field(
    tmp_path: Path, displays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nbdist.widgets.long_text.display", lambda *_, **__: None)
    path = tmp_path / "missing" / "folder" / "cell.txt"
    text = LongText("text", path, LongSearch("field", path))
    text.add([0], ["a line"])
    text.show()
    assert displays == {}
