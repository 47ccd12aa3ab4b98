"""Tables as text and as HTML."""

from __future__ import annotations

import re

import pytest

from nbdist.widgets.table import Table, bytes_text, seconds_text


def test_the_text_is_aligned_and_ends_with_the_caption():
    table = Table(["rank", "state"], [[0, "idle"], [10, None]], "two ranks")
    assert repr(table).splitlines() == [
        "rank  state", "----  -----", "0     idle", "10", "two ranks",
    ]  # fmt: skip


def test_names_of_users_are_escaped_in_html():
    shown = Table(["<h>"], [["<script>"]], "a & b")._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "&lt;h&gt;" in shown
    assert "a &amp; b" in shown


def test_the_columns_within_a_cell_of_several_lines_are_aligned_in_html():
    shown = Table(["rank", "net"], [[0, "name  norm\na        1"]])._repr_html_()
    one, several = re.findall(r'<td style="([^"]*)">', shown)
    assert "monospace" in several
    assert "monospace" not in one
    assert "vertical-align:top" in one  # the rank is beside the first line


def test_a_table_without_rows_still_has_its_header():
    assert "name" in repr(Table(["name"], []))


def test_a_table_without_rows_is_its_caption():
    table = Table(["leaf", "ranks"], [], "a & b are equal")
    assert repr(table) == "a & b are equal"
    assert table._repr_html_() == "<div>a &amp; b are equal</div>"


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, ""), (0, "0 MiB"), (3 * 2**20, "3 MiB"), (2**30, "1.00 GiB")],
)
def test_bytes_are_shown_in_units(size: int | None, text: str):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.04, "0.0 s"), (61, "1 min 01 s"), (7300, "2 h 01 min")],
)
def test_seconds_are_shown_in_units(seconds: float | None, text: str):
    assert seconds_text(seconds) == text
