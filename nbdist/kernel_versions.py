"""Whether the packages that a kernel has loaded are new enough."""

from __future__ import annotations

import sys
from typing import Any

from nbdist.errors import UsageError

__all__ = ["check_loaded"]

NEEDED = {"IPython": (8, 18), "ipykernel": (6, 29), "ipywidgets": (8, 1, 4)}
"""The lower bounds of pyproject.toml, of packages that a kernel loads by itself."""
LOSING_REQUESTS = (7, 0), (7, 4)
"""The first version of ipykernel that now and then leaves a request unread, and the
first that does not: the request's cell never begins, and no later one (ipykernel's pull
request 1529). Those of 7.0 also deliver nothing from threads."""


def check_loaded() -> None:
    """Check the versions that this process has loaded, and not those on the disk.

    A package that was upgraded while the kernel runs, as an installation in Colab does,
    is used in its old version until the kernel is restarted.

    Raises:
        UsageError: A loaded package is too old, or is a version that loses requests.
    """
    for name, needed in NEEDED.items():
        loaded = _loaded(name)
        if loaded is not None and loaded[: len(needed)] < needed:
            why = f"and nbdist needs {_text(needed)}"
            raise _refusal(name, loaded, why, f"-U {name}")
    loaded, (first, fixed) = _loaded("ipykernel"), LOSING_REQUESTS
    if loaded is not None and first <= loaded[:2] < fixed:
        why = "which loses requests, so that a cell may never begin"
        # Python 3.10 has no later one.
        other = f">={_text(fixed)}" if sys.version_info >= (3, 11) else "<7"
        raise _refusal("ipykernel", loaded, why, f'"ipykernel{other}"')


def _loaded(name: str) -> tuple[Any, ...] | None:
    """The version of a package that is loaded, as numbers."""
    found = getattr(sys.modules.get(name), "version_info", None)
    return None if found is None else tuple(found)


def _refusal(name: str, loaded: tuple[object, ...], why: str, other: str) -> UsageError:
    """The error of a loaded package.

    Args:
        name: The package.
        loaded: Its version, as numbers.
        why: Why it is refused.
        other: What pip must install.
    """
    from importlib.metadata import version

    found, installed = _text(loaded[:3]), version(name)
    upgrade = f"pip install {other}, and " if installed == found else ""
    return UsageError(
        f"this kernel has loaded {name} {found}, {why}. "
        f"Installed is {installed}: {upgrade}restart the kernel"
    )


def _text(numbers: tuple[object, ...]) -> str:
    return ".".join(map(str, numbers))
