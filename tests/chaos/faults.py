"""Injects each fault, from outside of the processes that get it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from jupyter_client.session import Session

from tests.processes import HANG_S, runs, wait_until
from tests.security import attack

__all__ = ["FolderFull", "exit_code", "kill", "send_wrong", "stop_and_continue"]

FILLED_IN_BYTES = 1 << 20


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes with SIGKILL, all at once. Returns when they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _await_end(processes)


def _await_end(processes: Sequence[psutil.Process]) -> None:
    wait_until(lambda: not any(map(runs, processes)), HANG_S)


def stop_and_continue(
    processes: Sequence[psutil.Process],
    on_stopped: Callable[[], None],
    said: Callable[[], bool],
    most_s: float,
) -> None:
    """Stop processes. Continue them when a note was made, or after `most_s` seconds."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        # The watcher of the processes may have continued them before this check.
        wait_until(lambda: said() or all(map(_stopped, processes)), HANG_S)
        on_stopped()
        with contextlib.suppress(AssertionError):  # no note: a later check fails
            wait_until(said, most_s)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def _stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return True  # another process has noticed the stop and ended it


def exit_code(processes: Sequence[psutil.Process], folder: Path, code: int) -> None:
    """Make processes that have called `listen` exit. Returns when they have ended."""
    fifos = [folder / f"exit {process.pid}" for process in processes]
    for fifo in fifos:
        wait_until(fifo.exists, HANG_S)
    writers = [os.open(fifo, os.O_WRONLY) for fifo in fifos]
    for writer in writers:
        os.write(writer, bytes([code]))
        os.close(writer)
    _await_end(processes)


class FolderFull:
    """Fills a file system that only the test uses.

    Args:
        folder: its root.
    """

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Fill it to the last byte."""
        with (
            contextlib.suppress(OSError),
            open(self._filler, "wb", buffering=0) as file,
        ):
            size = FILLED_IN_BYTES
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Free the space."""
        self._filler.unlink(missing_ok=True)


def send_wrong(run_dir: Path, port: str, engine_uuids: Sequence[str] = ()) -> None:
    """Send one message that is signed with another key to a controller's port.

    Args:
        port: the beginning of the name that `tests.security.attack` gives a socket.
        engine_uuids: the ranks that can be reached through it.
    """
    security = run_dir / "security"
    for end in ("client", "engine"):
        wait_until((security / f"ipcontroller-{end}.json").exists, HANG_S)
    found = attack.targets(run_dir, engine_uuids)
    target = next(each for each in found if each.name.startswith(port))
    stranger = Session(key=b"not the key of this cluster")
    with attack.Sender(run_dir, [target]) as sender:
        sender.send(target, stranger.serialize(stranger.msg("stream")))
