"""Functions of the ranks: they mark their position, and wait there for the fault.

The ranks and the workers of their loaders import this file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POLL_S = 0.002
BIG = 500_000
"""Elements of float64 in a value that is too large for a message."""
HELD_STEP = 5
"""The step whose commit waits for the fault."""


class _Here:
    """The state of this process."""

    folder = Path()
    batches: Iterator[Any] | None = None
    listens = 0
    """The process that has called `listen`."""


def begin(folder: str) -> None:
    """The setup cell: set the folder of the marks. A rank that joins may wait here."""
    _Here.folder = Path(folder)
    listen(_Here.folder)
    if (_Here.folder / "hold newcomers").exists():
        hold()


def listen(folder: Path) -> None:
    """Make this process end with the exit code that `faults.exit_code` sends."""
    if _Here.listens != os.getpid():
        _Here.listens = os.getpid()
        fifo = folder / f"exit {os.getpid()}"
        fifo.unlink(missing_ok=True)  # a process that has ended had the same pid
        os.mkfifo(fifo, 0o600)
        threading.Thread(target=_await_code, args=(folder,), daemon=True).start()


def _await_code(folder: Path) -> None:
    with open(folder / f"exit {os.getpid()}", "rb") as fifo:
        os._exit(fifo.read(1)[0])


def mark(folder: Path | None = None) -> None:
    """Write a mark: this rank has reached its position."""
    descriptor = os.open((folder or _Here.folder) / "marks", os.O_WRONLY)
    try:
        os.write(descriptor, b".")
    finally:
        os.close(descriptor)


def may_go(folder: Path | None = None) -> bool:
    """Whether the fault was injected."""
    return ((folder or _Here.folder) / "go").exists()


def hold(folder: Path | None = None) -> None:
    """Write a mark, and wait until the fault was injected."""
    if not may_go(folder):
        mark(folder)
    while not may_go(folder):
        time.sleep(POLL_S)


def reduce_until_injected() -> None:
    """Call all-reduces of 4 MB until the fault, and check each result."""
    import torch

    import nbdist

    told = False
    while True:
        x = torch.full((1_000_000,), nbdist.rank() + 1.0, device=nbdist.device())
        x[0] = float(may_go())
        nbdist.all_reduce(x)
        total = sum(range(1, nbdist.size() + 1))
        assert x[1:].eq(total).all()
        if x[0] > 0:
            return
        if not told:
            mark()
            told = True


class SlowToArrive:
    """A value whose unpickling on a rank waits until the fault was injected."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (str(self._folder),)


def _arrived(folder: str) -> int:
    hold(Path(folder))
    return 7


class SlowToLeave:
    """A value whose pickling on a rank waits until the fault was injected."""

    def __reduce__(self) -> tuple[Any, ...]:
        hold()
        return int, (7,)


class Tripwire:
    """A part of an elastic state. A commit or save waits when it copies this."""

    def state_dict(self) -> dict[str, int]:
        from IPython import get_ipython

        state = get_ipython().user_ns.get("state")
        if state is None or "step" not in dir(state) or state.step == HELD_STEP:
            hold()
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Items:
    """A data set whose workers `faults.exit_code` can end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, place: int) -> float:
        listen(self._folder)
        return float(place)


def fetch(batches: int = 1) -> None:
    """Fetch batches from a loader with one worker, which the first call starts."""
    import nbdist

    for _ in range(batches):
        if _Here.batches is None:
            items = Items(_Here.folder)
            _Here.batches = iter(nbdist.loader(items, 1, num_workers=1, prefetch=1))
        next(_Here.batches)


def workers() -> list[int]:
    """The processes of the workers of this rank's loader."""
    import psutil

    children = psutil.Process().children()
    return [child.pid for child in children if _is_worker(child.pid)]


def _is_worker(pid: int) -> bool:
    return (_Here.folder / f"exit {pid}").exists()


def drop_loader() -> None:
    """End the loader and its workers."""
    _Here.batches = None
