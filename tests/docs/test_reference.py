"""The API reference has every public name. `make docs` checks that it can be built."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import nbdist
import nbdist.elastic
import nbdist.errors
import nbdist.horovod
import nbdist.horovod.elastic
import nbdist.keras
import nbdist.strategies
import nbdist.torchft
from nbdist.magics import DistMagics

SITE = Path(__file__).parents[2] / "docs" / "site"
PAGES = sorted((SITE.parent / "api").glob("*.rst"))
FACES = [
    nbdist,
    nbdist.elastic,
    nbdist.errors,
    nbdist.horovod,
    nbdist.horovod.elastic,
    nbdist.keras,
    nbdist.strategies,
    nbdist.torchft,
]
ELSEWHERE = {
    "nbdist.elastic": "nbdist.elastic.run",
    "nbdist.strategies": "nbdist.strategies.Strategy",
    "nbdist.horovod.elastic": "nbdist.horovod.elastic.run",
    "nbdist.keras.callbacks": "nbdist.keras.ModelCheckpoint",
    "nbdist.elastic.Sampler": "nbdist.Sampler",
}
"""The entry that documents a module, or a name that has no entry of its own."""
INTERNAL = {
    "nbdist.errors.encodable",
    "nbdist.errors.message_of",
    "nbdist.errors.text_of",
}
"""Exported for nbdist's own modules."""


ENTRY = re.compile(r"(?:\.\. auto\w+:: |- :py:obj:`)(\w+)")
DATA = re.compile(r"\.\. data:: |^ {10}(?=\w)")


def entries() -> set[str]:
    """The full names that have an entry in docs/api."""
    found = set()
    for page in PAGES:
        module = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = match[1]
            elif match := ENTRY.match(DATA.sub(".. autodata:: ", line)):
                found.add(f"{module}.{match[1]}")
    return found


def magics_reference() -> str:
    sys.path.insert(0, str(SITE))
    try:
        text: str = importlib.import_module("reference").magics()
    finally:
        sys.path.remove(str(SITE))
    return text


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_every_public_name_has_an_entry(face: ModuleType):
    named = {f"{face.__name__}.{name}" for name in face.__all__} - INTERNAL
    present = entries()
    missing = {name for name in named if ELSEWHERE.get(name, name) not in present}
    # An error that `nbdist` exports has its entry there, as users type it.
    public = {f"nbdist.errors.{name}" for name in nbdist.__all__}
    assert missing - public == set()


def test_every_entry_names_something_that_exists():
    for name in sorted(entries()):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_the_cluster_s_methods_have_docstrings():
    methods = inspect.getmembers(nbdist.Cluster, lambda member: callable(member))
    named = {name: member for name, member in methods if not name.startswith("_")}
    assert {"execute", "push", "pull", "scale", "replace", "stacks"} <= named.keys()
    assert [name for name, method in named.items() if not method.__doc__] == []
    page = (SITE.parent / "api" / "cluster.rst").read_text(encoding="utf-8")
    assert ".. autoclass:: Cluster\n   :members:\n" in page


def test_every_magic_has_an_entry_with_every_option():
    text = magics_reference()
    for mark, kind in (("%", "line"), ("%%", "cell")):
        for name in DistMagics.magics[kind]:
            assert f"\n{mark}{name}\n" in text
            parser = getattr(getattr(DistMagics, name), "parser", None)
            entry = text.split(f".. _{name}:")[1].split(".. _")[0]
            for action in parser._actions if parser else []:
                assert str(action.help) in entry
                assert (action.option_strings or [action.dest])[-1] in entry
