"""Which Python runs on another host."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RemotePython"]

HOME = "~/"
CONDA_FOLDERS = (
    *("~/miniforge3", "~/miniconda3", "~/anaconda3", "~/mambaforge", "~/micromamba"),
    *("~/.conda", "~/.local/share/mamba", "/opt/conda", "/opt/miniforge3"),
)
"""Where conda and its kin are installed, or keep their environments."""


@dataclass(frozen=True)
class RemotePython:
    """The Python of another host: the first of some paths that it has.

    A path that begins with "~/" is in the home folder of the user there.
    """

    paths: tuple[str, ...]

    @classmethod
    def of(cls, path: str | None) -> RemotePython:
        """The Python at a path; for None, the counterpart of the notebook's.

        That is at the same path, at the same place in the home folder, or in the conda
        environment of the same name.
        """
        return cls(tuple(dict.fromkeys(_counterparts())) if path is None else (path,))

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs it there; exit code 127 if there is none."""
        paths = " ".join(map(_quoted, self.paths))
        search = f'for p in {paths}; do p=$(command -v "$p") && exec "$p" "$@"; done'
        return ["sh", "-c", f"{search}; exit 127", "sh", *arguments]

    def __str__(self) -> str:
        return " or ".join(self.paths)


def _counterparts() -> Iterator[str]:
    yield sys.executable
    executable, home = Path(sys.executable), Path.home()
    if executable.is_relative_to(home):
        yield HOME + str(executable.relative_to(home))
    prefix = Path(sys.prefix)
    # Its variables are those of the environment in which Jupyter was started.
    if (prefix / "conda-meta").is_dir():
        place = f"/envs/{prefix.name}" if prefix.parent.name == "envs" else ""
        for folder in CONDA_FOLDERS:
            yield f"{folder}{place}/{executable.relative_to(prefix)}"


def _quoted(path: str) -> str:
    if path.startswith(HOME):
        return '"$HOME"/' + shlex.quote(path.removeprefix(HOME))
    return shlex.quote(path)
