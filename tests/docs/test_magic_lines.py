"""The magics accept every line of the pages that calls them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from IPython.core.magic_arguments import parse_argstring

from nbdist.magics import DistMagics, parse_ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
CALL = re.compile(r"^(?:In \[\d+\]: )?%%?((?:dist_|distributed)\w*)[ \t]*(.*)$", re.M)
NAME = re.compile(r"`%%?((?:dist_|distributed)\w*)")


def calls_in(text: str) -> list[tuple[str, str]]:
    """Each magic's name and the rest of its line, without a comment."""
    found = [call for block in BLOCK.findall(text) for call in CALL.findall(block)]
    return [(name, line.split(" #")[0].strip()) for name, line in found]


def test_calls_are_found():
    page = "a\n```\n%dist_start -n 4  # four\nIn [1]: %dist_stop\n```\n"
    assert calls_in(page) == [("dist_start", "-n 4"), ("dist_stop", "")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_magic_line_on_a_page_parses(page: Path):
    text = page.read_text(encoding="utf-8")
    for name in NAME.findall(text):
        assert hasattr(DistMagics, name), name
    for name, line in calls_in(text):
        magic = getattr(DistMagics, name)
        if "[" in line or not hasattr(magic, "parser"):  # a synopsis; an expression
            continue
        arguments = parse_argstring(magic, line)
        parse_ranks(getattr(arguments, "ranks", None))


def test_an_unknown_option_is_refused():
    calls = calls_in("```\n%dist_start --processes 4\n```\n")
    assert calls == [("dist_start", "--processes 4")]
    with pytest.raises(UsageError, match="unrecognized arguments"):
        parse_argstring(DistMagics.dist_start, "--processes 4")
