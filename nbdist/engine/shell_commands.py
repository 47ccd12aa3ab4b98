"""Runs `!command` of a cell as a child process that an interrupt ends.

IPython's implementation loses an interrupt that comes before the command has begun, and
then waits for the end of the command.
"""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any

from nbdist.engine.interrupts import Interrupts

__all__ = ["install"]

GRACE_S = 1.0
CHUNK_BYTES = 1 << 16


def install(shell: Any, interrupts: Interrupts) -> None:
    """Make this IPython shell run `!` commands with this module."""
    shell.system = partial(_run, shell, interrupts)


def _run(shell: Any, interrupts: Interrupts, command: str) -> None:
    """Run a command, and print its output as it comes.

    The variable `_exit_code` gets the exit code, as in IPython.
    """
    if command.rstrip().endswith("&"):
        raise OSError(
            "a `!` command cannot run in the background: use subprocess.Popen"
        )
    expanded = shell.var_expand(command, depth=1)
    process = None
    try:
        with interrupts.deferred():  # a running command must be in `process`
            process = subprocess.Popen(
                expanded,
                shell=True,
                executable=os.environ.get("SHELL", "/bin/sh"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        _copy(process)
        shell.user_ns["_exit_code"] = process.wait()
    except KeyboardInterrupt:
        if process is not None:
            _end(process)
        raise


def _copy(process: subprocess.Popen[bytes]) -> None:
    """Copy the output to sys.stdout, which the user may have replaced."""
    assert process.stdout is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with process.stdout as pipe:
        while data := pipe.read(CHUNK_BYTES):
            sys.stdout.write(decoder.decode(data))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command and its children; kill them if they do not end."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
