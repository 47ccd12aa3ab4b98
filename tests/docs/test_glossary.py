"""Each word of the glossary has its file, and the file has the word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def rows() -> list[tuple[str, Path]]:
    """Each word, with each file that its row names."""
    found = []
    for section in PAGE.split("\n## ")[1:]:
        heading, _, table = section.partition("\n")
        folders = re.findall(r"`nbdist/(\w+)`", heading)
        folder = ROOT / "nbdist" / (folders[0] if len(folders) == 1 else "")
        for line in table.splitlines():
            word, *cells = line.strip("| ").split(" | ")
            files = re.findall(r"`([\w/]+\.\w+)`", cells[-1]) if len(cells) == 2 else []
            found += [(word, folder / file) for file in files]
    return found


def test_the_words_are_found_in_the_page() -> None:
    assert ("plan", ROOT / "nbdist" / "collectives" / "group.py") in rows()
    assert len(rows()) > 80


@pytest.mark.parametrize(
    ("word", "file"), rows(), ids=[f"{word} in {file.name}" for word, file in rows()]
)
def test_the_file_has_the_word(word: str, file: Path) -> None:
    text = f"{file.stem} {file.read_text(encoding='utf-8')}".lower()
    for term in word.lower().split(", "):
        # Names in the code may have only the last part of a term.
        assert term.split()[-1].rstrip("s") in text
