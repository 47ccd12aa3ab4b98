"""`python -m nbdist examples`: copies the example notebooks."""

from __future__ import annotations

import shutil
from importlib.metadata import files
from pathlib import Path

import nbdist
from nbdist.errors import UsageError

__all__ = ["copy"]


def copy(folder: Path) -> int:
    """Copy the notebooks into a folder. Files that are there stay as they are.

    Args:
        folder: Made if it does not exist.

    Returns:
        The exit code, 0.

    Raises:
        UsageError: The folder cannot be made, or has one of the notebooks.
    """
    notebooks = _installed() or _of_checkout()
    there = [path.name for path in notebooks if (folder / path.name).exists()]
    if there:
        raise UsageError(f"{folder} has {there[0]} already: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in notebooks:
            shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise UsageError(f"{folder}: {error}: name another folder") from error
    print(f"{len(notebooks)} notebooks are in {folder}. Begin with:")
    print(f"  jupyter lab {folder / 'quickstart.ipynb'}")
    return 0


def _installed() -> list[Path]:
    """The notebooks of the installed wheel; [] in an editable installation."""
    listed = files("nbdist") or []
    return [
        Path(str(path.locate()))
        for path in listed
        if path.match("share/nbdist/examples/*")
    ]


def _of_checkout() -> list[Path]:
    folder = Path(nbdist.__file__).parents[1] / "examples"
    return sorted([*folder.glob("*.ipynb"), *folder.glob("marimo_*.py")])
