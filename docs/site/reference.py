"""Parts of the API reference that autodoc cannot write: magics, and the errors' tree.

`conf.py` makes directives of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import nbdist.errors
from nbdist.magics import DistMagics

__all__ = ["error_tree", "magics"]


def magics() -> str:
    """reStructuredText with each magic: usage, what it does, its arguments."""
    return "\n".join(line for name in _names() for line in (*_entry(name), ""))


def error_tree() -> str:
    """reStructuredText with the hierarchy that `nbdist.errors` draws."""
    drawn = str(nbdist.errors.__doc__).split("\n\n")[1]
    return "::\n\n" + "\n".join(f"   {line}" for line in drawn.splitlines()) + "\n"


def _names() -> list[str]:
    """The magics in the order of the code, each with its % or %%."""
    mark = dict.fromkeys(DistMagics.magics["line"], "%")
    mark |= dict.fromkeys(DistMagics.magics["cell"], "%%")
    return [mark[name] + name for name in vars(DistMagics) if name in mark]


def _entry(magic: str) -> Iterator[str]:
    function = getattr(DistMagics, magic.lstrip("%"))
    parser: argparse.ArgumentParser | None = getattr(function, "parser", None)
    yield from (f".. _{magic.lstrip('%')}:", "", magic, "-" * len(magic), "")
    if parser is None:
        yield str(function.__doc__)
        return
    usage = parser.format_usage().split("%", 1)[1].split()
    yield from (f"``{' '.join([magic, *usage[1:]])}``", "", str(parser.description), "")
    for action in parser._actions:
        yield f"``{_spelling(action)}``"
        yield f"   {action.help}"


def _spelling(action: argparse.Action) -> str:
    """Such as `-r, --ranks RANKS`, or `script` for an argument without dashes."""
    if not action.option_strings:
        return action.dest
    value = "" if action.nargs == 0 else f" {action.dest.upper()}"
    return ", ".join(action.option_strings) + value
