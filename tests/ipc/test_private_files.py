"""The folders of a cluster: those of other users are refused, and all are removed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbdist.ipc import private_files, serialization, shm_payload


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def memory(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in memory of a cluster. A temporary folder replaces /dev/shm."""
    shared = tmp_path / "shm"
    shared.mkdir(mode=0o777)
    monkeypatch.setattr(private_files, "MEMORY_FOLDER", shared)
    private_files.make_memory_folder(run_dir, private_files.new_memory_folder())
    return private_files.memory_folder(run_dir)


def test_the_folder_in_memory_is_private_and_found_by_its_link(
    memory: Path, run_dir: Path
) -> None:
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700
    assert run_dir.name not in memory.name
    assert os.readlink(run_dir / "memory") == str(memory)
    (memory / "commit").write_bytes(b"")
    private_files.remove_folders(run_dir, memory)
    assert not memory.exists()
    assert not run_dir.exists()


def test_a_folder_that_is_written_to_while_it_is_removed_is_removed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree
    late = iter([memory / "a last file"])

    def rmtree(folder: Path, ignore_errors: bool) -> None:
        for path in late:
            path.touch()
            return
        remove(folder, ignore_errors)

    monkeypatch.setattr(private_files.shutil, "rmtree", rmtree)
    private_files.remove_folders(memory)
    assert not memory.exists()


def test_without_shared_memory_the_run_folder_is_used(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "MEMORY_FOLDER", tmp_path / "nowhere")
    private_files.make_memory_folder(run_dir, private_files.new_memory_folder())
    assert private_files.memory_folder(run_dir) == run_dir
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("mib", [16, 15])
def test_the_rendezvous_folder_is_in_memory_if_there_is_room(
    memory: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, mib: int
) -> None:
    usage = SimpleNamespace(free=mib << 20)
    monkeypatch.setattr(private_files.shutil, "disk_usage", lambda _: usage)
    private_files.make_rendezvous_folder(run_dir, 2)
    wanted = memory / "rendezvous" if mib == 16 else run_dir
    assert private_files.rendezvous_folder(run_dir) == wanted


@pytest.mark.parametrize("taken", ["open to others", "a link"])
def test_a_folder_of_another_user_is_refused_and_not_removed(
    memory: Path, run_dir: Path, taken: str
) -> None:
    shutil.rmtree(memory)
    if taken == "a link":
        memory.symlink_to(run_dir.parent)
    else:
        memory.mkdir()
        memory.chmod(0o755)
        (memory / "commit").write_bytes(b"a stranger's")
    with pytest.raises(PermissionError, match=r"may have written it"):
        private_files.memory_folder(run_dir)
    private_files.remove_folders(run_dir, memory)
    assert memory.exists()


def plant(path: Path, what: str) -> None:
    """Put something at `path` that is not a private regular file."""
    if what == "a link":
        path.with_name("real").touch(mode=0o600)
        path.symlink_to("real")
    elif what == "a FIFO":
        os.mkfifo(path, 0o600)
    elif what == "a folder":
        path.mkdir(mode=0o700)
    else:
        path.touch()
        path.chmod(0o644)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("what", ["a link", "a FIFO", "a folder", "a readable file"])
def test_only_a_regular_private_file_of_this_user_is_opened(
    memory: Path, what: str
) -> None:
    plant(memory / "commit", what)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"may have written it|symbolic link"):
        private_files.read_file(memory / "commit")
    assert os.listdir("/proc/self/fd") == before


def test_a_value_is_not_unpickled_from_a_file_of_another_user(
    memory: Path, run_dir: Path
) -> None:
    shipment = shm_payload.load(serialization.dumps(b"x" * 2_000_000), run_dir)
    assert shipment.path is not None
    path = Path(shipment.path)
    assert path.parent == memory
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="may have written it"):
        shm_payload.unload(shipment)


def test_a_value_is_sent_in_its_message_if_no_folder_has_room(
    memory: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: object, _octets: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shm_payload, "_write_all", full)
    shipment = shm_payload.load(serialization.dumps(b"x" * 2_000_000), run_dir)
    assert shipment.path is None
    assert shm_payload.unload(shipment) == b"x" * 2_000_000
    assert [*memory.iterdir(), *run_dir.glob("tmp*")] == []


def test_a_run_folder_is_made_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, roomy = tmp_path / "full", tmp_path / "roomy"
    free = {full: 1_000_000, roomy: 1 << 30}
    for folder in free:
        folder.mkdir()
    monkeypatch.setattr(private_files.tempfile, "gettempdir", lambda: str(full))
    monkeypatch.setattr(private_files, "MEMORY_FOLDER", roomy)
    monkeypatch.setattr(
        private_files.shutil,
        "disk_usage",
        lambda folder: SimpleNamespace(free=free[Path(folder)]),
    )
    made = private_files.make_run_folder()
    assert made.parent == roomy
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    free[roomy] = 2_000_000
    with pytest.raises(OSError, match=r"full has 1\.0 MB.*roomy has 2\.0 MB.*TMPDIR"):
        private_files.make_run_folder()
