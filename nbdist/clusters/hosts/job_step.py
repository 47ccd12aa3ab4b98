"""Keeps the signals of Slurm from the agent of a host and its ranks, and reports them.

Slurm signals the processes of a step before it ends them: when their job is cancelled
or pre-empted, at its time limit, and when its option `--signal` says. Which processes
are signalled depends on the site: the step's own alone, or also all below it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
from collections.abc import Callable

from nbdist.ipc.channels import Channels
from nbdist.ipc.prctl import name_process

__all__ = ["JobStep"]

HEARD = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
"""The signals that end a process, and that a batch system is asked to send."""


class JobStep:
    """The step of a job that this process runs in.

    In a step, this process goes on as one that is not below the step's process. That
    one stays, and reports its signals. Call it before a thread is started.
    """

    def __init__(self) -> None:
        self._signals: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reports: socket.socket | None = None
        if "SLURM_STEP_ID" in os.environ:
            self._reports = _leave()

    def watch(self, channels: Channels, on_end: Callable[[], None]) -> None:
        """Receive signals on a loop.

        Args:
            channels: The loop.
            on_end: Called when the step's process has ended.
        """
        reports = self._reports
        if reports is None:
            return

        def read() -> None:
            numbers = reports.recv(64)
            for number in numbers:
                self._signals.put(signal.Signals(number).name)
            if not numbers:
                channels.unwatch(reports)
                on_end()

        channels.watch(reports, read)

    def await_signal(self, timeout_s: float) -> str | None:
        """Wait for the next signal.

        Returns:
            Its name, such as "SIGTERM"; None if none has come within `timeout_s`.
        """
        with contextlib.suppress(queue.Empty):
            return self._signals.get(timeout=timeout_s)
        return None


def _leave() -> socket.socket:
    """Go on in a process that is not below this one, which reports its signals.

    Returns:
        The connection with this process. It ends with this process, and this process
        with it.
    """
    here, there = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    between = os.fork()
    if between:
        here.close()
        os.waitpid(between, 0)
        name_process("nbdist-step")  # Slurm passes over names with spaces
        _report(there)
    if os.fork():
        os._exit(0)
    there.close()
    os.setsid()  # some sites signal the group of the step's process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    return here


def _report(agent: socket.socket) -> None:
    """Send the number of each signal to the agent, and end when the agent has."""
    with open(os.devnull, "r+b") as nothing:
        for stream in (0, 1):  # the agent's
            os.dup2(nothing.fileno(), stream)
    agent.setblocking(False)
    signal.set_wakeup_fd(agent.fileno())
    for number in HEARD:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    select.select([agent], [], [])
    os._exit(0)
