"""Runs programs as other Unix users. Only root can start them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
OWNER, STRANGER = 64_001 + 2 * _WORKER, 64_002 + 2 * _WORKER
"""User ids that no account has, and no other process of the tests uses."""


def interpreters() -> list[tuple[str, list[str]]]:
    """Interpreters for other users, each with the folders for its path.

    The environment's interpreter may be in a home folder that others cannot enter.
    """
    packages = sysconfig.get_paths()["purelib"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [(sys.executable, []), (f"/usr/bin/python{version}", [packages])]


@functools.cache
def found() -> tuple[str, list[str]] | str:
    """A Python that another user can run, and its path, or the reason for none."""
    if os.geteuid() != 0:
        return "only root can become another user"
    said = ""
    for interpreter, packages in interpreters():
        path = [str(ROOT), *packages]
        try:
            subprocess.run(
                [interpreter, "-c", "import torch, nbdist"],
                check=True,
                capture_output=True,
                text=True,
                **_as_user(OWNER, Path("/"), path),  # type: ignore[call-overload]
            )
        except OSError as error:
            said += f" {interpreter}: {error}."
        except subprocess.CalledProcessError as error:
            said += f" {interpreter}: {error.stderr[-300:]}."
        else:
            return interpreter, path
    return f"no other user can run Python and nbdist here:{said}"


def why_not() -> str:
    """Why no program can run as another user; "" if one can."""
    here = found()
    return here if isinstance(here, str) else ""


def start(uid: int, home: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start a Python program as another user, with pipes for lines of text."""
    here = found()
    assert not isinstance(here, str), here
    interpreter, path = here
    return subprocess.Popen(
        [interpreter, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        **_as_user(uid, home, path),  # type: ignore[call-overload]
    )


def _as_user(uid: int, home: Path, path: Sequence[str]) -> dict[str, object]:
    """Arguments of `subprocess.Popen` for a program of another user."""
    beside = [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    environment = {
        "PATH": os.pathsep.join(beside),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
    }
    return {
        "user": uid,
        "group": uid,
        "extra_groups": [],
        "env": environment,
        "cwd": home,
    }


@contextmanager
def home_of(uid: int) -> Iterator[Path]:
    """A private folder of another user. It is removed at the end."""
    made = Path(tempfile.mkdtemp(prefix="home-"))
    try:
        os.chown(made, uid, uid)
        yield made
    finally:
        shutil.rmtree(made)
