"""The folders of a process supervisor are removed, whichever process ends first."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from nbdist.clusters.supervisor_client import Loss, SupervisorClient
from nbdist.ipc.private_files import make_memory_folder, new_memory_folder
from tests.cluster_processes import process_supervisors
from tests.processes import HANG_S, Program, wait_until

NOTEBOOK = """
import shutil, sys, tempfile
from pathlib import Path
from nbdist.clusters.supervisor_client import SupervisorClient
from nbdist.ipc.private_files import make_memory_folder, new_memory_folder
run_dir, memory = Path(tempfile.mkdtemp(dir={folder!r})), new_memory_folder()
client = SupervisorClient(run_dir)
client.remove_at_end(memory)
make_memory_folder(run_dir, memory)
shutil.rmtree(run_dir)
print(memory, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=tmp_path))


@pytest.fixture
def client(run_dir: Path) -> SupervisorClient:
    return SupervisorClient(run_dir)


def supervisor_of(run_dir: Path) -> psutil.Process:
    def found() -> list[psutil.Process]:
        return [p for p in process_supervisors() if str(run_dir) in p.cmdline()]

    wait_until(lambda: bool(found()))  # Linux shows it a moment after `exec`
    (process,) = found()
    return process


def test_the_folder_in_memory_is_removed_after_the_run_folder_was_deleted(
    client: SupervisorClient, run_dir: Path
) -> None:
    memory = new_memory_folder()
    client.remove_at_end(memory)
    make_memory_folder(run_dir, memory)
    shutil.rmtree(run_dir)
    supervisor = supervisor_of(run_dir)
    supervisor_input = client._process.stdin
    assert supervisor_input is not None
    supervisor_input.close()  # as when the notebook's process ends
    supervisor.wait(HANG_S)
    assert not memory.exists()
    client.close()


def test_the_folder_in_memory_is_removed_after_the_notebook_was_killed(
    tmp_path: Path,
) -> None:
    with Program(NOTEBOOK.format(folder=str(tmp_path))) as notebook:
        memory = Path(notebook.line())
        assert memory.is_dir()
        notebook.kill()
    wait_until(lambda: not memory.exists(), HANG_S)


def test_a_folder_that_is_made_after_the_supervisor_was_killed_is_removed(
    client: SupervisorClient, run_dir: Path
) -> None:
    memory = new_memory_folder()
    client.remove_at_end(memory)
    supervisor_of(run_dir).kill()
    wait_until(lambda: not run_dir.exists(), HANG_S)
    memory.mkdir(mode=0o700)
    client.close()
    assert not memory.exists()


def test_the_folders_of_a_supervisor_that_is_killed_while_it_ends_are_removed(
    client: SupervisorClient, run_dir: Path, tmp_path: Path
) -> None:
    memory = new_memory_folder()
    client.remove_at_end(memory)
    make_memory_folder(run_dir, memory)
    ready, caught = tmp_path / "ready", tmp_path / "caught"
    wont_end = f"trap 'touch {caught}' TERM; touch {ready}; while :; do sleep 0.1; done"
    client.start("stubborn", ["sh", "-c", wont_end], dict(os.environ))
    wait_until(ready.exists, HANG_S)
    supervisor = supervisor_of(run_dir)

    def kill() -> None:
        wait_until(caught.exists, HANG_S)
        supervisor.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    client.close()
    killer.join()
    stubborn = client.pid("stubborn")
    assert stubborn is not None
    os.kill(stubborn, signal.SIGKILL)
    assert not memory.exists()
    assert not run_dir.exists()


def test_the_end_of_the_process_supervisor_is_told_to_who_asks_later(
    client: SupervisorClient, run_dir: Path
) -> None:
    """It may end between the start of the ranks and the first who wants to know."""
    supervisor_of(run_dir).kill()
    assert not client.wait(lambda: False, None), "returns when it has ended"
    told: queue.SimpleQueue[Loss] = queue.SimpleQueue()
    client.on_loss(told.put)
    loss = told.get(timeout=HANG_S)
    assert "the process supervisor has ended with SIGKILL" in loss.reason
    client.close()


def test_what_a_process_supervisor_writes_before_it_ends_is_in_the_reason(
    client: SupervisorClient, run_dir: Path
) -> None:
    told: queue.SimpleQueue[Loss] = queue.SimpleQueue()
    client.on_loss(told.put)
    assert client._process.stdin is not None
    client._process.stdin.write(b"no order\n")
    client._process.stdin.flush()
    loss = told.get(timeout=HANG_S)
    assert "has ended with exit code 1" in loss.reason
    assert "JSONDecodeError" in loss.reason
    client.close()


def test_a_program_that_cannot_be_started_fails_with_the_reason(
    client: SupervisorClient, run_dir: Path
) -> None:
    nowhere = str(run_dir / "nowhere")
    client.start("lost", ["true"], {}, cwd=nowhere)
    client.wait(lambda: client.exit_code("lost") is not None, HANG_S)
    assert client.exit_code("lost") == 127
    assert nowhere in client.log("lost").read_text()
    client.close()
