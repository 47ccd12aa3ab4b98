"""Texts of users and systems are escaped wherever nbdist writes HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.clusters.collective_history import CollectiveHistory
from nbdist.clusters.profile import Profile
from nbdist.telemetry.collector import Collector
from nbdist.widgets.grid import Grid
from nbdist.widgets.live_text import DisplayText
from nbdist.widgets.long_search import Found, LongSearch, _page
from nbdist.widgets.long_text import LongText
from nbdist.widgets.looking import values_table
from nbdist.widgets.picture import picture
from nbdist.widgets.start_view import StartView
from nbdist.widgets.table import Table
from nbdist.widgets.widget_board import WidgetBoard
from nbdist.wire import Batch, Mark, Sample, Shown
from tests.rank_info import rank_info

PACKAGE = Path(__file__).parents[2] / "nbdist"
TAG = "<x>"
IMAGE = {"data": {"image/png": "", "text/plain": TAG}}
Displayed = list[str]
"""The HTML of each display."""


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> Displayed:
    """What is displayed, or updated, by the modules of this test."""
    shown: Displayed = []

    def take(bundle: dict[str, str], **_: object) -> None:
        shown.append(bundle["text/html"])

    for name in ("live_text", "long_text", "widget_board"):
        for function in ("display", "update_display"):
            monkeypatch.setattr(f"nbdist.widgets.{name}.{function}", take)
    return shown


def of_display_text(shown: Displayed) -> str:
    DisplayText("name").show(TAG, "a notice")
    return shown[-1]


def of_a_notice(shown: Displayed) -> str:
    DisplayText("name").show("a text", TAG)
    return shown[-1]


def of_a_long_text(shown: Displayed, line: str = TAG, path: Path | None = None) -> str:
    text = LongText("name", None)
    text._path = path
    text.add([0], [line, line])
    text.show(now=True)
    return shown[-1]


def of_the_path_of_a_long_text(shown: Displayed) -> str:
    return of_a_long_text(shown, "a line", Path(TAG))


def of_a_search_without_a_file(_: Displayed) -> str:
    class Refuses:
        def open(self, *_: object, **__: object) -> None:
            raise OSError(0, TAG)

    search = LongSearch("name", Refuses())  # type: ignore[arg-type]
    search._field.value = "text"
    return str(search._result.value)


def of_a_failed_start(shown: Displayed) -> str:
    view = StartView(TAG)  # type: ignore[arg-type]
    view._text = DisplayText("name")
    view.__exit__(OSError)
    return shown[-1]


def of_the_ranks(shown: Displayed) -> str:
    view = StartView(1)
    view._text = DisplayText("name")
    view.finish([rank_info(0)], TAG)
    return shown[-1]


def of_widgets(shown: Displayed) -> str:
    widgets: Any = SimpleNamespace(
        add_place=lambda _: None, text_of=lambda _: TAG, find=lambda _: None
    )
    widget: Any = SimpleNamespace(rank=0, engine="e", comm=None, name="w")
    board = WidgetBoard("name", widgets, lambda _: None)  # type: ignore[arg-type]
    board.add(widget)
    board._rows[0, "e"]._frozen = TAG
    board.show()
    return shown[-1]


def of_a_picture(metric: str = "loss", mark: str = "", name: str = "") -> str:
    collector = Collector()
    sample = Sample(0, 0, 0.0, {metric: 1.0})
    records = sample, Mark(1.0, "lost", mark)
    collector.receive(Batch(0, "source", 0, 0, records))
    return picture(collector.snapshot(), [metric], name=name)


def of_a_metric(_: Displayed) -> str:
    page = of_a_picture(metric=TAG)
    source = re.search(r'base64,([^"]*)', page)
    assert source is not None
    return page + base64.b64decode(source[1]).decode()


def of_a_profile(_: Displayed) -> str:
    class Named(Profile):
        summary = TAG

    return Named([])._repr_html_()


def of_a_history(_: Displayed) -> str:
    class Named(CollectiveHistory):
        summary = TAG

    return Named([], (), 0)._repr_html_()


def of_a_value(shown: Shown) -> str:
    image = Shown("", "other", image="data")
    return values_table("x", {0: shown, 1: image})._repr_html_()


WRITERS: dict[str, tuple[str, Callable[[Displayed], str]]] = {
    "a status": ("widgets/live_text.py", of_display_text),
    "a notice": ("widgets/live_text.py", of_a_notice),
    "a table's head": ("widgets/table.py", lambda _: Table([TAG], [[1]])._repr_html_()),
    "a table's cell": (
        "widgets/table.py",
        lambda _: Table(["a"], [[TAG]])._repr_html_(),
    ),
    "a table's note": ("widgets/table.py", lambda _: Table([], [], TAG)._repr_html_()),
    "a grid's note": ("widgets/grid.py", lambda _: Grid([], [TAG])._repr_html_()),
    "a grid's image": (
        "widgets/grid.py",
        lambda _: Grid([([0], IMAGE)], [])._repr_html_(),
    ),
    "a grid's width": (
        "widgets/grid.py",
        lambda _: Grid(
            [([0], {**IMAGE, "metadata": {"image/png": {"width": TAG}}})], []
        )._repr_html_(),
    ),
    "a value": ("widgets/looking.py", lambda _: of_a_value(Shown(TAG, "digest"))),
    "a long text": ("widgets/long_text.py", of_a_long_text),
    "a long text's path": ("widgets/long_text.py", of_the_path_of_a_long_text),
    "a found line": (
        "widgets/long_search.py",
        lambda _: _page(Found([(1, f"{TAG}text{TAG}")], {"0": 1}, 1, True), "text"),
    ),
    "a searched text": (
        "widgets/long_search.py",
        lambda _: _page(Found([(1, TAG)], {"0": 1}, 1, True), TAG),
    ),
    "a search's error": ("widgets/long_search.py", of_a_search_without_a_file),
    "a start's failure": ("widgets/start_view.py", of_a_failed_start),
    "the ranks": ("widgets/start_view.py", of_the_ranks),
    "widgets": ("widgets/widget_board.py", of_widgets),
    "a metric": ("widgets/picture.py", of_a_metric),
    "a mark": ("widgets/picture.py", lambda _: of_a_picture(mark=TAG)),
    "a picture's class": ("widgets/picture.py", lambda _: of_a_picture(name=TAG)),
    "an empty picture": (
        "widgets/picture.py",
        lambda _: picture(Collector().snapshot(), [], name=TAG),
    ),
    "a profile": ("clusters/profile.py", of_a_profile),
    "a history": ("clusters/collective_history.py", of_a_history),
}
WITHOUT_TEXT = {
    "widgets/display.py",  # shows the picture
    "widgets/stop_button.py",  # shows a widget, and then nothing
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_text_is_escaped(name: str, displayed: Displayed) -> None:
    page = WRITERS[name][1](displayed)
    assert "&lt;x&gt;" in page
    assert TAG not in page


def test_every_writer_of_html_is_tested() -> None:
    html = re.compile(r"text/html|_repr_html_|</\w+>|ipywidgets\.HTML")
    writers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if html.search(path.read_text(encoding="utf-8"))
    }
    assert writers == {file for file, _ in WRITERS.values()} | WITHOUT_TEXT
