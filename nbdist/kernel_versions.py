"""Whether the packages that a kernel has loaded are new enough."""

from __future__ import annotations

import sys

from nbdist.errors import UsageError

__all__ = ["check_loaded"]

NEEDED = {"IPython": (8, 18), "ipykernel": (6, 29), "ipywidgets": (8, 1, 4)}
"""The lower bounds of pyproject.toml, of packages that a kernel loads by itself."""


def check_loaded() -> None:
    """Check the versions that this process has loaded, and not those on the disk.

    A package that was upgraded while the kernel runs, as an installation in Colab does,
    is used in its old version until the kernel is restarted.

    Raises:
        UsageError: A loaded package is too old.
    """
    from importlib.metadata import version

    for name, needed in NEEDED.items():
        loaded = getattr(sys.modules.get(name), "version_info", None)
        if loaded is None or tuple(loaded[: len(needed)]) >= needed:
            continue
        bound, found, installed = _text(needed), _text(loaded[:3]), version(name)
        upgrade = f"pip install -U {name}, and " if installed == found else ""
        raise UsageError(
            f"this kernel has loaded {name} {found}, and nbdist needs {bound}. "
            f"Installed is {installed}: {upgrade}restart the kernel"
        )


def _text(numbers: tuple[object, ...]) -> str:
    return ".".join(map(str, numbers))
