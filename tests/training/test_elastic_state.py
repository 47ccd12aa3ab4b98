"""A state keeps its last commit complete, in memory and in files."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import nbdist
from nbdist.errors import CheckpointError, UsageError
from nbdist.training.elastic import checkpoint, tree
from nbdist.training.elastic.state import State


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take one step, so that the optimizer has state."""
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def make(**more: Any) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return State(
        model=model, optimizer=optimizer, scheduler=scheduler, step=0, seen=[], **more
    )


def advance(state: State) -> None:
    trained(state.model, state.optimizer)
    state.scheduler.step()
    state.step += 1
    state.seen.append(state.step)


def values(state: State) -> Any:
    """The current values of a state."""
    return copy.deepcopy(state._capture())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_training_after_a_restore_equals_training_after_the_commit() -> None:
    state = make()
    for _ in range(3):
        advance(state)
        state.commit()
    kept = values(state)
    for _ in range(2):
        advance(state)
    after = values(state)
    for _ in range(2):  # what is restored shares nothing with the commit
        state.restore()
        assert same(values(state), kept)
        for _ in range(2):
            advance(state)
        assert same(values(state), after)
    assert state.commits == 3


def test_a_third_commit_allocates_no_tensor() -> None:
    state = make()
    addresses = []
    for _ in range(5):
        advance(state)
        state.commit()
        _skeleton, tensors = tree.split(state._committed.values)
        addresses.append([tensor.data_ptr() for tensor in tensors])
    assert addresses[4] == addresses[2] != addresses[3]


def test_an_expanded_tensor_is_restored() -> None:
    state = State(weight=torch.tensor([2.0]).expand(3))
    state.commit()
    state.weight = torch.tensor([5.0]).expand(3)
    state.restore()
    assert state.weight.tolist() == [2.0, 2.0, 2.0]


def test_restoring_without_a_commit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"commit\(\)"):
        make().restore()


def test_only_named_values_are_attributes() -> None:
    state = make()
    with pytest.raises(AttributeError, match=r"State\(stpe=...\)"):
        state.stpe = 1
    with pytest.raises(AttributeError, match="no 'loss'"):
        _ = state.loss
    with pytest.raises(UsageError, match="'commit'"):
        State(commit=1)
    with pytest.raises(UsageError, match="save_every=0"):
        State(save_every=0)


def test_a_pickled_state_has_no_commit() -> None:
    state = make()
    state.commit()
    copied = pickle.loads(pickle.dumps(state))
    assert copied.commits == 0
    assert same(values(copied), values(state))


def test_a_state_loaded_in_another_process_is_equal(tmp_path: Path) -> None:
    state = make(path=tmp_path / "state", save_every=2)
    for _ in range(5):
        advance(state)
        state.commit()
    fresh = make()
    fresh.load(tmp_path / "state")
    assert fresh.step == fresh.commits == 4
    advance(fresh)
    assert same(values(fresh), values(state))
    fresh.step = 0
    fresh.restore()
    assert fresh.step == 4


@pytest.fixture
def two_saves(tmp_path: Path) -> Path:
    """Save step 2 to a file, and step 1 to the previous file."""
    state = make()
    path = tmp_path / "run.state"
    for _ in range(2):
        state.step += 1
        state.save(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "run.state", "run.state.previous",
    ]  # fmt: skip
    return path


@pytest.mark.parametrize("cut", [0, 5, 30, 60, 500, -1])
def test_an_incomplete_file_is_refused_and_the_previous_one_is_used(
    two_saves: Path, cut: int
) -> None:
    two_saves.write_bytes(two_saves.read_bytes()[:cut])
    state = make()
    with pytest.warns(UserWarning, match=r"run\.state .*run\.state\.previous is used"):
        state.load(two_saves)
    assert state.step == 1


@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_changed_byte_is_noticed(
    two_saves: Path, where: float, flip: int
) -> None:
    data = bytearray(checkpoint.previous(two_saves).read_bytes())
    path = two_saves.with_name("changed")
    path.write_bytes(data)
    assert checkpoint.check(path).path == path
    data[int(where * len(data))] ^= flip
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=str(path)):
        checkpoint.check(path)


def test_two_damaged_files_are_both_named(two_saves: Path) -> None:
    two_saves.write_bytes(b"NBDSTATE")
    checkpoint.previous(two_saves).write_text("something else entirely, not a state")
    with pytest.raises(CheckpointError, match=r"run\.state is .*state\.previous is"):
        make().load(two_saves)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none.* cannot be read: No such file"):
        make().load(tmp_path / "none")


def test_the_file_of_another_state_is_refused(two_saves: Path) -> None:
    with pytest.raises(CheckpointError, match="this State has weights"):
        State(weights=torch.ones(2)).load(two_saves)


class Plain:
    """An object of a user's class."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain)

    __hash__ = None  # type: ignore[assignment]


def test_objects_of_any_class_are_loaded_only_when_trusted(tmp_path: Path) -> None:
    State(thing=Plain()).save(tmp_path / "state")
    state = State(thing=None)
    with pytest.raises(CheckpointError, match="trusted=True"):
        state.load(tmp_path / "state")
    state.load(tmp_path / "state", trusted=True)
    assert state.thing == Plain()


def test_a_save_that_fails_leaves_the_old_file(two_saves: Path) -> None:
    before = two_saves.read_bytes()
    with pytest.raises(TypeError):
        checkpoint.write(two_saves, {"no": object()}, b"")
    assert two_saves.read_bytes() == before
    assert len(list(two_saves.parent.iterdir())) == 2


def test_run_without_ranks_calls_once_and_passes_errors() -> None:
    calls = []

    @nbdist.elastic.run(max_restarts=1)
    def train(state: State, more: int) -> int:
        calls.append(more)
        if more < 0:
            raise ValueError(more)
        state.step += more
        state.commit()
        return state.step

    state = make()
    assert train(state, 3) == 3
    with pytest.raises(ValueError, match="-1"):
        train(state, -1)
    assert train(state, 4) == 7
    assert calls == [3, -1, 4]
    assert train.__name__ == "train"


def test_run_refuses_invalid_arguments() -> None:
    with pytest.raises(UsageError, match="min_ranks=0"):
        nbdist.elastic.run(min_ranks=0)
    with pytest.raises(UsageError, match="max_ranks=1"):
        nbdist.elastic.run(min_ranks=2, max_ranks=1)
    with pytest.raises(UsageError, match="timeout_s=0"):
        nbdist.elastic.run(timeout_s=0)
    with pytest.raises(UsageError, match="got a int: the first argument"):
        nbdist.elastic.run(lambda state: None)(5)


class Words(dict):  # type: ignore[type-arg]
    """A subclass of dict with an attribute."""

    language = "en"


def containers() -> dict[str, Any]:
    words = Words(a=torch.ones(2))
    words.language = "de"
    return {
        "counter": Counter(a=2),
        "lists": defaultdict(list, {1: [torch.ones(2)]}),
        "by_cell": defaultdict(lambda: 7, {"x": 1}),
        "ordered": OrderedDict(b=1, a=torch.ones(1)),
        "model": nn.BatchNorm1d(3).state_dict(),
        "words": words,
        "pair": Pair(1, torch.ones(2)),
        "nested": {"seen": [Counter(b=1), defaultdict(int)]},
    }


class Pair(NamedTuple):
    first: int
    second: torch.Tensor


def check_containers(state: State) -> None:
    state.counter["new"] += 1
    state.lists["new"].append(1)
    state.by_cell["new"] += 1
    assert state.by_cell["new"] == 8
    assert list(state.ordered) == ["b", "a"]
    state.ordered.move_to_end("b")
    assert state.model._metadata[""]["version"] == 2
    assert type(state.words) is Words
    assert state.pair.first == 1


def test_a_restored_container_has_its_class() -> None:
    state = State(**containers())
    for _ in range(3):  # a third commit uses the memory of the first
        state.commit()
        state.restore()
        check_containers(state)
        state.nested["seen"][0]["new"] += 1
        state.nested["seen"][1]["new"] += 1
        state.restore()
    assert state.words.language == "de"


def test_a_container_from_a_file_has_its_class(tmp_path: Path) -> None:
    State(**containers() | {"pair": None}).save(tmp_path / "state")
    other = State(**containers() | {"pair": None})
    other.load(tmp_path / "state")  # of a file that is not trusted
    other.pair = Pair(1, torch.ones(2))
    check_containers(other)


def test_containers_keep_their_class_on_their_way_to_another_rank() -> None:
    sent = tree.split(containers())
    received = tree.unite(*pickle.loads(pickle.dumps(sent)))
    values = tree.in_classes_of(containers(), received)
    check_containers(State(**values))
    assert values["words"].language == "de"
