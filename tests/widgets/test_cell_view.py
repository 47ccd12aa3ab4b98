"""The output of a distributed cell, from the messages of simulated ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.clusters.observer import Event
from nbdist.widgets import cell_view, live_text, long_text
from nbdist.widgets.cell_view import CellView
from tests.processes import HANG_S


class Screen:
    """Replaces the notebook's output area: text, and displays by display id."""

    def __init__(self) -> None:
        self.shown: dict[str, Any] = {}
        self.lost: list[str] = []

    def display(self, data: Any, *, display_id: str = "grid", **_rest: object) -> None:
        assert display_id not in self.shown
        self.shown[display_id] = data

    def update(self, data: Any, *, display_id: str, **_rest: object) -> None:
        if display_id in self.shown:
            self.shown[display_id] = data
        else:
            self.lost.append(display_id)

    def clear(self, *, wait: bool) -> None:
        self.shown.clear()
        print("cleared")

    @property
    def texts(self) -> list[str]:
        """The current texts of the displays that are not blank, in their order."""
        texts = [data["text/plain"] for data in self.shown.values()]
        return [text for text in texts if text]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    screen = Screen()
    monkeypatch.setattr(cell_view, "display", screen.display)
    monkeypatch.setattr(cell_view, "update_display", screen.update)
    monkeypatch.setattr(live_text, "display", screen.display)
    monkeypatch.setattr(live_text, "update_display", screen.update)
    monkeypatch.setattr(long_text, "display", screen.display)
    monkeypatch.setattr(long_text, "update_display", screen.update)
    monkeypatch.setattr(live_text, "in_notebook", lambda: True)
    monkeypatch.setattr(cell_view, "in_notebook", lambda: True)
    monkeypatch.setattr(cell_view, "may_clear_output", lambda: True)
    monkeypatch.setattr(cell_view, "clear_output", screen.clear)
    yield screen
    assert screen.lost == []


class Cell:
    """A view, and simulated ranks that send messages to it."""

    count = 0

    def __init__(
        self, ranks: int = 2, *, is_alone: bool = False, path: Path | None = None
    ) -> None:
        Cell.count += 1
        key = f"cell-{Cell.count}"
        self.view = CellView(range(ranks), key, is_alone=is_alone, path=path)

    def send(self, rank: int, kind: str, **content: Any) -> None:
        message = {"msg_type": kind, "content": content}
        self.view.take(Event(rank, message, 0.0))

    def say(self, rank: int, text: str, name: str = "stdout") -> None:
        self.send(rank, "stream", name=name, text=text)

    def show(self, rank: int, text: str, own_id: str | None = None) -> None:
        transient = {"display_id": own_id} if own_id else {}
        data = {"text/plain": text, "text/html": text}
        self.send(rank, "display_data", data=data, metadata={}, transient=transient)

    def update(self, rank: int, text: str, own_id: str) -> None:
        data = {"text/plain": text, "text/html": text}
        transient = {"display_id": own_id}
        self.send(
            rank, "update_display_data", data=data, metadata={}, transient=transient
        )

    def clear(self, *ranks: int, wait: bool = True) -> None:
        for rank in ranks:
            self.send(rank, "clear_output", wait=wait)

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            self.view.take(Event(rank, None, 1.0))


def plain(text: str) -> list[str]:
    from nbdist.clusters.failures import ANSI

    return ANSI.sub("", text).splitlines()


def test_lines_are_shown_under_their_ranks(capsys: pytest.CaptureFixture[str]):
    cell = Cell(3)
    for rank in range(3):
        cell.say(rank, f"alike\nmine {rank}\nno newline")
        cell.say(rank, "careful\n", "stderr")
    cell.end(0, 1, 2)
    cell.view.close()
    shown = capsys.readouterr()
    assert plain(shown.out) == [
        "[0-2] alike", "[0] mine 0", "[1] mine 1", "[2] mine 2", "[0-2] no newline",
    ]  # fmt: skip
    assert plain(shown.err) == ["[0-2] careful"]


def test_a_line_is_shown_before_the_cell_ends(capsys: pytest.CaptureFixture[str]):
    cell = Cell(2)
    cell.say(0, "now\n")
    deadline = time.monotonic() + HANG_S
    while not (text := capsys.readouterr().out):
        assert time.monotonic() < deadline
        time.sleep(cell.view.due() or 0)
    assert plain(text) == ["[0] now"]


def test_values_are_shown_beside_their_number(capsys: pytest.CaptureFixture[str]):
    cell = Cell(2)
    for rank in (0, 1):
        data = {"text/plain": str(rank)}
        cell.send(rank, "execute_result", data=data, execution_count=7, metadata={})
    cell.view.close()
    assert plain(capsys.readouterr().out) == ["[0] Out[7]: 0", "[1] Out[7]: 1"]


def test_equal_displays_are_shown_once(screen: Screen):
    cell = Cell(2)
    cell.show(0, "figure")
    cell.show(1, "figure")
    cell.show(1, "other")
    cell.end(0, 1)
    cell.view.close()
    assert screen.texts == ["figure", "other"]


def out_of_step(cell: Cell, lines: int = 1) -> None:
    """Rank 1 shows everything, and then rank 0 does."""
    for rank in (1, 0):
        cell.say(rank, "alike\n" * lines + f"mine {rank}\n")
        cell.show(rank, "figure")
        cell.end(rank)
        while cell.view._waiting_since is not None:
            time.sleep(cell.view.due() or 0)
    cell.view.close()


def test_the_end_brings_output_into_rank_order(
    screen: Screen, capsys: pytest.CaptureFixture[str]
):
    out_of_step(Cell(is_alone=True))
    shown = plain(capsys.readouterr().out)
    assert "[1] alike" in shown[: shown.index("cleared")]
    assert shown[shown.index("cleared") + 1 :] == [
        "[0-1] alike", "[0] mine 0", "[1] mine 1", "[0-1]",
    ]  # fmt: skip
    assert screen.texts == ["figure"]


def test_the_end_shows_figures_of_different_ranks_side_by_side(
    screen: Screen, capsys: pytest.CaptureFixture[str]
):
    cell = Cell(3, is_alone=True)
    pixels = {"image/png": "iVBORw0K\n", "text/plain": "<Figure>"}
    size = {"image/png": {"width": 20, "height": 10}}
    for rank in (2, 0):
        cell.say(rank, f"drawn by {rank}\n")
        data = {**pixels, "text/plain": f"<Figure {rank}>"}
        cell.send(rank, "display_data", data=data, metadata=size)
    cell.say(1, "drawn by 1\n")
    vector = {"image/svg+xml": "<svg>é</svg>", "text/plain": "<Figure 1>"}
    cell.send(1, "display_data", data=vector)
    cell.end(0, 1, 2)
    assert len(screen.shown) == 3
    cell.view.close()
    (shown,) = screen.shown.values()
    assert shown["text/plain"].splitlines() == [
        "[0] <Figure 0>", "[1] <Figure 1>", "[2] <Figure 2>",
    ]  # fmt: skip
    html = shown["text/html"]
    at = [html.index(f">[{rank}]<") for rank in range(3)]
    assert at == sorted(at)
    assert 'src="data:image/png;base64,iVBORw0K"' in html
    assert 'width="20" height="10"' in html
    assert 'src="data:image/svg+xml;base64,PHN2Zz7DqTwvc3ZnPg=="' in html
    assert plain(capsys.readouterr().out)[-4:] == [
        "cleared", "[0] drawn by 0", "[1] drawn by 1", "[2] drawn by 2",
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["equal", "named", "text"])
def test_other_displays_stand_below_each_other(screen: Screen, what: str):
    cell = Cell(2, is_alone=True)
    for rank in (0, 1):
        if what == "equal":
            cell.show(rank, "alike")
            cell.show(rank, "also alike")
        elif what == "named":
            cell.show(rank, f"table {rank}", own_id=f"name {rank}")
        else:
            data = {"text/plain": f"text {rank}"}
            cell.send(rank, "display_data", data=data, metadata={})
    cell.end(0, 1)
    cell.view.close()
    assert len(screen.shown) == 2
    assert "grid" not in screen.shown


@pytest.mark.parametrize("why", ["other output", "long", "a note"])
def test_output_keeps_its_order_if_it_cannot_be_replaced(
    screen: Screen, capsys: pytest.CaptureFixture[str], why: str
):
    cell = Cell(is_alone=why != "other output")
    if why == "a note":
        live_text.print_note("rank 1 was replaced")
    out_of_step(cell, 1000 if why == "long" else 1)
    assert "cleared" not in plain(capsys.readouterr().out)
    assert screen.texts.count("figure") == 2


def test_output_in_rank_order_is_not_replaced(
    screen: Screen, capsys: pytest.CaptureFixture[str]
):
    cell = Cell(is_alone=True)
    for rank in (0, 1):
        cell.say(rank, f"alike\nmine {rank}\n")
    cell.end(0, 1)
    cell.view.close()
    shown = plain(capsys.readouterr().out)
    assert shown == ["[0-1] alike", "[0] mine 0", "[1] mine 1"]


def test_displays_with_a_display_id_are_not_merged(screen: Screen):
    cell = Cell(2)
    cell.show(0, "0 %", "bar")
    cell.show(1, "0 %", "bar")
    cell.update(0, "50 %", "bar")
    cell.update(1, "70 %", "bar")
    cell.view.close()
    assert screen.texts == ["50 %", "70 %"]


def test_a_later_cell_may_update_a_display(screen: Screen):
    first, second = Cell(1), Cell(1)
    first.show(0, "0 %", "bar")
    first.view.close()
    second.update(0, "100 %", "bar")
    second.view.close()
    assert screen.texts == ["100 %"]


@pytest.mark.parametrize("wait", [True, False])
def test_clear_output_replaces_the_display_of_a_rank(screen: Screen, wait: bool):
    cell = Cell(2)
    for step in range(4):
        for rank in (0, 1):
            cell.clear(rank, wait=wait)
            cell.show(rank, f"rank {rank} step {step}")
    cell.view.close()
    assert sorted(screen.texts) == ["rank 0 step 3", "rank 1 step 3"]


def test_clear_output_replaces_a_merged_display(screen: Screen):
    cell = Cell(2)
    cell.show(0, "start")
    cell.show(1, "start")
    for rank in (0, 1):
        cell.clear(rank)
        cell.show(rank, f"own {rank}")
    cell.view.close()
    assert sorted(screen.texts) == ["own 0", "own 1"]


def test_clear_output_replaces_displays_with_a_display_id(screen: Screen):
    cell = Cell(1)
    for step in range(3):
        cell.clear(0)
        cell.show(0, f"step {step}", f"id{step}")
        cell.update(0, f"step {step} done", f"id{step}")
    cell.view.close()
    assert screen.texts == ["step 2 done"]


def test_clear_output_without_wait_clears_at_once(screen: Screen):
    cell = Cell(1)
    cell.show(0, "gone")
    cell.clear(0, wait=False)
    cell.view.close()
    assert screen.texts == []


def test_a_long_cell_shows_the_ranks_that_have_finished(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cell_view, "STATUS_AFTER_S", 0.0)
    cell = Cell(3)
    cell.say(1, "10%\r20%")
    cell.end(0)
    cell.view.due()
    (status,) = screen.texts
    assert "rank 0 finished" in status
    assert "rank 1-2 running" in status
    assert "[1] 20%" in status
    cell.end(1, 2)
    cell.view.close()
    assert screen.texts == []
    assert "rank 0-2 finished" in capsys.readouterr().out


def test_the_last_line_shows_the_outcome_of_each_rank(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cell_view, "STATUS_AFTER_S", 0.0)
    cell = Cell(8)
    cell.view.due()
    ends = [
        "finished",
        "failed",
        "died",
        "interrupted",
        "timed out",
        "left",
        "finished",
    ]
    for rank, outcome in enumerate(ends):
        cell.view.take(Event(rank, None, float(rank), outcome=outcome))
    cell.view.due()
    cell.view.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.removeprefix("\x1b[2m").removesuffix("\x1b[0m").split("   ") == [
        "✓ rank 0,6 finished in 0.0 to 6.0 s",
        "✗ rank 1 failed after 1.0 s",
        "✗ rank 2 died after 2.0 s",
        "■ rank 3 interrupted after 3.0 s",
        "■ rank 4 timed out after 4.0 s",
        "○ rank 5 left after 5.0 s",
        "● rank 7 did not react",
    ]


def test_an_unfinished_line_is_cut_in_the_status_and_complete_in_the_text(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cell_view, "STATUS_AFTER_S", 0.0)
    cell = Cell(1)
    cell.say(0, "x" * 1_000_000)
    cell.view.due()
    (status,) = screen.texts
    assert len(status) < 1000
    assert "(1,000,000 characters)" in status
    cell.view.close()
    assert "x" * 1_000_000 + "\n" in capsys.readouterr().out


def test_a_notice_is_in_the_status_until_it_is_withdrawn(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cell_view, "STATUS_AFTER_S", 0.0)
    cell = Cell()
    cell.view.notice("the others wait for rank 1\nrank 1 for 12 s: In[3] line 4")
    cell.view.due()
    (status,) = screen.texts
    assert status.splitlines()[1:] == [
        "⚠ the others wait for rank 1",
        "rank 1 for 12 s: In[3] line 4",
    ]
    cell.view.notice("")
    cell.view.due()
    assert "wait for" not in screen.texts[0]


@pytest.mark.parametrize("chunk", [1, 500, 12_000])
def test_a_long_text_is_collapsed(
    screen: Screen, capsys: pytest.CaptureFixture[str], tmp_path: Path, chunk: int
):
    path = tmp_path / "output" / "cell-1.txt"
    cell = Cell(2, is_alone=True, path=path)
    for begin in range(0, 12_000, chunk):
        lines = [f"step {step}" for step in range(begin, begin + chunk)]
        cell.say(1, "\n".join([*lines, ""]))
    cell.view._flush()
    cell.say(1, "[nbdist] a note\n", "stderr")
    cell.end(0, 1)  # within a second, in which the display is not drawn again
    cell.view.close()
    shown = capsys.readouterr()
    assert plain(shown.out) == [f"[1] step {step}" for step in range(1000)]
    assert plain(shown.err) == ["[1] [nbdist] a note"]
    (data,) = screen.shown.values()
    assert data["text/html"].count("<details>") == 1
    assert "[1] 11,001 more lines, of which the last 800 are here" in data["text/html"]
    assert "step 11999" in data["text/html"]
    assert "step 2000\n" not in data["text/html"]
    assert len(data["text/html"]) < 20_000
    assert str(path) in data["text/plain"]
    written = path.read_text(encoding="utf-8").splitlines()
    assert written == [
        *(f"[1] step {step}" for step in range(12_000)),
        "[1] [nbdist] a note",
    ]


def test_each_rank_of_a_long_text_has_its_lines(
    screen: Screen, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    cell = Cell(2, path=tmp_path / "missing" / "output" / "cell.txt")
    cell.say(0, "alike <b>\n" * 1500)
    cell.say(1, "alike <b>\n" * 1500)
    cell.say(0, "mine\n" * 300)
    cell.end(0, 1)
    cell.view.close()
    assert len(plain(capsys.readouterr().out)) == 1000
    (data,) = screen.shown.values()
    page = data["text/html"]
    assert "[0] 800 more lines, of which the last 400 are here" in page
    assert "[1] 500 more lines, of which the last 400 are here" in page
    assert page.index("[0] 800") < page.index("[1] 500")
    assert "alike &lt;b&gt;" in page
    # The folder could not be made: the text of the notebook is not affected.
    assert "the other lines are lost: [Errno 2]" in data["text/plain"]


def test_a_short_text_is_not_collapsed(
    screen: Screen, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    cell = Cell(2, is_alone=True, path=tmp_path / "output" / "cell.txt")
    cell.say(1, "".join(f"one {step}\n" for step in range(500)))
    cell.view.due()
    cell.view._flush()
    cell.say(0, "".join(f"zero {step}\n" for step in range(500)))
    cell.end(0, 1)
    cell.view.close()
    out = capsys.readouterr().out
    assert plain(out.rpartition("cleared\n")[2])[::999] == ["[0] zero 0", "[1] one 499"]
    assert screen.shown == {}
    assert not (tmp_path / "output").exists()
