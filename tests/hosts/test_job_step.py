"""The agent of a host in a step of a job: which processes hear the job's signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from nbdist.ipc.host_sockets import GREETING
from tests.processes import wait_until

WITHIN_S = 20.0


@pytest.fixture
def step() -> Iterator[subprocess.Popen[bytes]]:
    """The process of a step, whose agent has begun."""
    argv = [sys.executable, "-m", "nbdist.clusters.hosts.agent", "here", "15"]
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "SLURM_STEP_ID": "0"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.read(len(GREETING)) == GREETING
    yield process
    process.stdin.close()
    process.wait(WITHIN_S)
    process.stdout.close()


def _has_ended(step: subprocess.Popen[bytes]) -> bool:
    """Whether the agent has closed its end of the stream; reads what it has sent."""
    assert step.stdout is not None
    readable, _, _ = select.select([step.stdout], [], [], 0)
    return bool(readable) and os.read(step.stdout.fileno(), 1 << 16) == b""


def test_the_agent_is_not_below_the_step(step: subprocess.Popen[bytes]):
    process = psutil.Process(step.pid)
    assert process.children(recursive=True) == []
    assert " " not in process.name()  # Slurm would not find it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_neither_of_them(
    step: subprocess.Popen[bytes], number: signal.Signals
):
    step.send_signal(number)
    assert not _has_ended(step)
    with pytest.raises(subprocess.TimeoutExpired):
        step.wait(1.0)
    assert not _has_ended(step)


def test_the_agent_ends_with_the_step(step: subprocess.Popen[bytes]):
    step.kill()
    wait_until(lambda: _has_ended(step), WITHIN_S)


def test_the_step_ends_with_the_agent(step: subprocess.Popen[bytes]):
    assert step.stdin is not None
    step.stdin.close()
    assert step.wait(WITHIN_S) == 0
