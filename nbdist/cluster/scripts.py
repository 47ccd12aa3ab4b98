"""Scripts that ranks and workers are to run: checked before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path

from nbdist.errors import UsageError

__all__ = ["checked_script", "script_file"]


def script_file(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a script.

    Raises:
        UsageError: There is no such file.
    """
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise UsageError(
            f"no script {os.fspath(path)!r}: looked for {file}; write its path from "
            "the notebook's folder, or a whole one"
        )
    return file


def checked_script(path: str | os.PathLike[str], n_ps: int, size: int) -> Path:
    """A script for `size` ranks, of which `n_ps` are parameter servers.

    Raises:
        UsageError: There is no such file, or no worker is left.
    """
    if isinstance(n_ps, bool) or not isinstance(n_ps, int) or not 0 <= n_ps < size:
        raise UsageError(
            f"--n-ps {n_ps!r}: of {size} ranks, 0 to {size - 1} can be parameter "
            "servers, for one must work"
        )
    return script_file(path)
