"""Whether the packages that a kernel has are new enough, and not newer than tested."""

from __future__ import annotations

import re
import sys
from typing import Any

from nbdist.errors import UsageError

__all__ = ["TORCH_RUNS", "check_loaded", "untested_torch"]

NEEDED = {"IPython": (8, 18), "ipykernel": (6, 29), "ipywidgets": (8, 1, 4)}
"""The lower bounds of pyproject.toml, of packages that a kernel loads by itself."""
TORCH_RUNS = {
    "2.15.0": "2026-11-26",
    "2.14.1": "2026-11-26",
    "2.13.0": "2026-11-28",
    "2.11.0": "2026-11-21",
    "2.9.1": "2026-11-21",
    "2.7.0": "2026-11-21",
}
"""The versions of torch with which tests were run, and when last. The table in
docs/architecture.md says which tests."""
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


def untested_torch() -> str | None:
    """A line about the installed torch if it is newer than all of `TORCH_RUNS`.

    torch is not imported for it.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("torch")
    except PackageNotFoundError:  # the ranks may have another environment
        return None
    newest = max(TORCH_RUNS, key=_numbers)
    if _numbers(found) <= _numbers(newest):
        return None
    return (
        f"torch {found} is newer than {newest}, the newest that was run: "
        f'if something fails, try pip install "torch=={newest}"'
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 16, 0) of "2.16.0.dev20261126+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    assert found is not None, version
    return tuple(map(int, found[0].split(".")))


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
