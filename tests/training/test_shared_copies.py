"""The files have a complete commit at whatever moment their process is killed."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nbdist
from nbdist.errors import CheckpointError, ClusterError
from nbdist.training.elastic import checkpoint, commit_files, shared_copies
from nbdist.training.elastic import coordinator as coordinators
from nbdist.training.elastic.shared_copies import read_shared
from nbdist.training.elastic.state import State
from nbdist.wire import Resume

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for commits."""
    made = tmp_path / "commits"
    made.mkdir(mode=0o700)
    return made


def sharing(folder: Path, *others: Path, **values: Any) -> State:
    """A state whose commits are in files, as on rank 0 of an elastic run."""
    state = State(**values)
    state._share([folder, *others])
    return state


def kept(folder: Path) -> tuple[int, dict[str, Any]]:
    """The number and the values of the commit in a folder."""
    opened = checkpoint.check(folder / "record")
    return opened.header["commit"], read_shared(opened)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


VALUES = {
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "expanded": torch.ones(1).expand(4),
    "parameter": nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "nested": {"list": [torch.arange(5), 1, "text"], "pair": (None, 2.5)},
}


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other) or isinstance(one, Tensor)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for each, another in zip(one, other, strict=True):
            assert_equal(each, another)
    else:
        assert one == other


def test_every_kind_of_value_is_read_unchanged(folder: Path) -> None:
    state = sharing(folder, **VALUES)
    for number in (1, 2, 3):
        state.commit()
        found, values = kept(folder)
        assert found == number
        assert_equal(values, state._capture())
    assert values["channels_last"].stride() == VALUES["channels_last"].stride()


def test_a_third_commit_allocates_no_file_and_no_tensor(folder: Path) -> None:
    state = sharing(folder, weight=torch.zeros(1000))
    seen = []
    for _ in range(5):
        state.weight += 1
        state.commit()
        seen.append((names(folder), state._committed.values["weight"].data_ptr()))
    assert seen[4] == seen[2] != seen[3]
    assert len(seen[4][0]) == 3  # a record and two copies


def test_a_commit_with_other_shapes_has_a_new_layout(folder: Path) -> None:
    state = sharing(folder, weights=[torch.zeros(3)])
    sizes = random.Random(1)
    for number in range(1, 30):
        state.weights = [
            torch.full((sizes.randrange(40_000),), float(number))
            for _ in range(sizes.randrange(4))
        ]
        state.commit()
        assert_equal(kept(folder), (number, {"weights": state.weights}))
        assert len(names(folder)) <= 3


class Abandoned(BaseException):
    """Ends a commit at the point at which a SIGKILL would."""


def test_a_commit_abandoned_at_any_step_leaves_the_previous_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abandon(*_args: object, **_options: object) -> None:
        raise Abandoned

    steps = [
        (shared_copies, "_new_file"),
        (shared_copies._Copy, "fill"),
        (shared_copies._Copy, "pickled"),
        (commit_files.Record, "packed"),
        (Path, "replace"),
    ]
    for owner, name in steps:
        state = sharing(folder, weight=torch.ones(10))
        for number in (1, 2, 3):
            state.weight = torch.full((10 * number,), float(number))
            state.commit()
        # Larger than before: the file is replaced, and values are copied.
        state.weight = torch.full((9_000_000,), 4.0)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, abandon)
            with pytest.raises(Abandoned):
                state.commit()
        assert_equal(kept(folder), (3, {"weight": torch.full((30,), 3.0)}))


COMMITS = 200


def commit_until_killed(folder: Path, committed: int, seed: int) -> None:
    """Make commits whose values all equal their number. Runs in a child."""
    torch.set_num_threads(1)
    sizes = random.Random(seed)
    count, size = 1, 100
    state = sharing(folder, parts=[], number=0)
    for number in range(1, COMMITS + 1):
        if sizes.random() < 0.2:
            count, size = sizes.randrange(1, 5), sizes.randrange(30_000)
        state.parts = [torch.full((size,), number) for _ in range(count)]
        state.number = number
        state.commit()
        os.write(committed, bytes([number]))


@pytest.mark.parametrize("seed", [90210, 4711, 7])
def test_a_process_killed_at_any_moment_leaves_a_complete_commit(
    folder: Path, seed: int
) -> None:
    print(f"seed {seed}")
    moments = random.Random(seed)
    for turn in range(15):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fork of a process with threads
            child = os.fork()
        if not child:
            try:
                commit_until_killed(folder, writing, seed + turn)
            finally:
                os._exit(0)
        os.close(writing)
        committed = os.read(reading, 1)[0]  # the first commit is there
        time.sleep(moments.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while said := os.read(reading, 256):
            committed = said[-1]
        os.close(reading)
        number, values = kept(folder)
        assert number in (committed, committed + 1), (seed, turn)
        assert values["number"] == number
        assert all(part.eq(number).all() for part in values["parts"]), (seed, turn)


def test_another_rank_0_takes_over_with_its_first_commit(folder: Path) -> None:
    old = sharing(folder, step=1, weight=torch.ones(4))
    old.commit()
    new = sharing(folder, step=2, weight=torch.zeros(4))
    new._stage_shared(new._capture())  # and it dies here
    new = sharing(folder, step=3, weight=torch.zeros(4))
    assert kept(folder)[1]["step"] == 1
    new.commit()
    assert kept(folder)[1]["step"] == 3
    assert len(names(folder)) == 2


def full(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Make the folders report too little free space."""

    def usage(path: Path) -> Usage:
        return Usage(1, 1, 0 if path in folders else 1 << 40)

    monkeypatch.setattr(shared_copies.shutil, "disk_usage", usage)


def test_a_folder_without_room_is_skipped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    state = sharing(folder, other, weight=torch.ones(10))
    state.commit()
    full(monkeypatch, folder)
    state.weight = torch.ones(9_000_000)
    with pytest.warns(UserWarning, match=r"may be slow: .* has too little room"):
        state.commit()
    assert kept(other)[0] == 2
    assert "record" not in names(folder)
    with pytest.warns(UserWarning, match="may be slow"):  # of the second copy
        state.commit()
    state.commit()
    assert kept(other)[0] == 4
    assert len(names(other)) == 3
    assert not names(folder)


def test_without_room_the_training_continues_and_warns_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = sharing(folder, weight=torch.ones(10))
    state.commit()
    full(monkeypatch, folder)
    state.weight = torch.full((9_000_000,), 2.0)
    with pytest.warns(UserWarning, match=r"will lose.*needs 4. MB.*has 0 MB free"):
        state.commit()
    assert not names(folder)  # no run may continue from an old commit
    for value in (3.0, 4.0):
        state.weight += 1
        state.commit()
        state.weight.zero_()
        state.restore()
        assert state.weight.eq(value).all()


def test_a_value_that_cannot_be_pickled_is_reported_once(folder: Path) -> None:
    state = sharing(folder, rule=lambda step: step, step=1)
    with pytest.warns(UserWarning, match=r"will lose.*[Pp]ickl"):
        state.commit()
    state.commit()
    assert state.commits == 2
    assert not names(folder)


@pytest.mark.parametrize("shape", [10, 20], ids=["same shape", "new file"])
def test_no_commit_completes_after_the_folder_was_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shape: int
) -> None:
    monkeypatch.setattr(shared_copies, "END_TIMEOUT_S", 0.1)
    state = sharing(folder, weight=torch.ones(10))
    for _ in range(3):
        state.commit()
    taken = folder.rename(folder.with_name("taken"))
    state.weight = torch.full((shape,), 2.0)
    with pytest.raises(ClusterError, match="ends this cluster"):
        state.commit()
    assert_equal(kept(taken), (3, {"weight": torch.ones(10)}))


def test_a_record_becomes_an_ordinary_file(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = {name: value for name, value in VALUES.items() if name != "sparse"}
    state = sharing(folder, **plain)
    state.commit()
    record = commit_files.read_record(checkpoint.check(folder / "record"))
    data = os.open(folder / record.data, os.O_RDONLY)
    with (tmp_path / "file").open("wb") as file:
        record.write_state(file, data)
    os.close(data)
    other = State(**dict.fromkeys(plain))
    other.load(tmp_path / "file")  # not trusted
    assert other.commits == 1
    assert_equal(other._capture(), state._capture())


def test_a_user_cannot_load_a_record(folder: Path) -> None:
    state = sharing(folder, step=1)
    state.commit()
    with pytest.raises(CheckpointError, match="part of a running cluster"):
        State(step=0).load(folder / "record")
    (
        folder / commit_files.read_record(checkpoint.check(folder / "record")).data
    ).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*No such file"):
        State(step=0).load(folder / "record", trusted=True)


class Folders(coordinators.NoCoordinator):
    """A coordinator whose notebook keeps commits."""

    def __init__(self, *folders: Path) -> None:
        self.commit_folders = folders


@pytest.fixture
def notebook(folder: Path) -> Iterator[Folders]:
    before = coordinators.coordinator()
    installed = Folders(folder)
    coordinators.install(installed)
    yield installed
    coordinators.install(before)


def test_the_next_run_begins_from_the_kept_commits(
    folder: Path, notebook: Folders
) -> None:
    @nbdist.elastic.run
    def train(state: State, steps: int) -> None:
        for _ in range(steps):
            state.weight += 1
            state.commit()

    state = State(weight=torch.zeros(5))
    state.commit()
    assert not names(folder)  # no run
    train(state, 3)
    state.weight += 5
    state.commit()
    state.commit()  # the copies in the files are touched no more
    assert kept(folder)[1]["weight"].tolist() == [3.0] * 5
    notebook.resume = Resume(str(folder / "record"), trusted=True)
    resumed = State(weight=torch.zeros(5))
    train(resumed, 2)
    assert resumed.weight.tolist() == [5.0] * 5
    assert kept(folder)[1]["weight"].tolist() == [5.0] * 5
    other = State(model=nn.Linear(1, 1))  # has other names: begins by itself
    assert other.commits == 0
