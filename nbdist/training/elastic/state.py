"""The values that elastic training protects, and their last commit."""

from __future__ import annotations

import io
import os
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbdist.errors import CheckpointError, UsageError
from nbdist.ipc.interrupts import defer_interrupts
from nbdist.telemetry import internal_metrics
from nbdist.training import keras_models, lasting
from nbdist.training.elastic import checkpoint, tree
from nbdist.training.elastic.commit_files import Commit, is_record
from nbdist.training.elastic.coordinator import coordinator
from nbdist.training.elastic.ranks import Ranks, broadcast_tree, ranks
from nbdist.training.elastic.shared_copies import (
    NotShared,
    SharedCopies,
    read_shared,
)
from nbdist.training.files import own_device, write_on_rank_0
from nbdist.training.validation import whole_number

__all__ = ["SizeChange", "State"]

OnReset = Callable[[int, int], object]
_NO_COMMIT = Commit(0, 0, {})


class SizeChange(BaseException):
    """Ends the training function at a commit, so that the world can change its size.

    It derives from BaseException so that no `except Exception` of the training function
    catches it.
    """


class State:
    """Values that survive the death of a rank and a change of the world's size.

    `commit` copies all values in each rank's memory. `restore` loads the last copy.
    Each value is an attribute: `state.epoch += 1`.

    A state keeps two copies beside the current values, so that one of them is always
    complete. In a notebook's elastic run, rank 0's copies are in files that survive the
    death of all ranks.

    Args:
        path: a file to which rank 0 also writes commits; None for no file.
        save_every: rank 0 writes every `save_every`-th commit to `path`, and one when
            the job of a batch system is about to reach its time limit.
        objects: objects with `state_dict` and `load_state_dict` (modules, optimizers,
            schedulers, samplers, gradient scalers), tensors on any device, and plain
            values, which are deep-copied. For a module in DDP, the wrapped module is
            saved and restored; for a Keras model, the state of its optimizer too.

    Raises:
        UsageError: a name is that of an attribute of State, or `save_every` is below 1.
        CheckpointError: the cluster resumes from a file that does not fit this state.
    """

    _objects: dict[str, Any]
    _path: Path | None
    _save_every: int
    _callbacks: list[OnReset]
    _committed: Commit
    _staged: Commit
    _in_run: bool
    _loaded: bool
    """Whether the values come from a file, and no run has synchronized them yet."""
    _folders: Sequence[Path]
    """The folders for rank 0's copies; empty to keep the copies in its memory."""
    _shared: SharedCopies | None

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        save_every: int = 1,
        **objects: Any,
    ) -> None:
        for name in objects:
            if self._is_reserved(name):
                raise UsageError(
                    f"State has an attribute {name!r}: give the value another name"
                )
        set_attribute = super().__setattr__
        set_attribute("_objects", dict(objects))
        set_attribute("_path", None if path is None else Path(path))
        set_attribute("_save_every", whole_number("save_every", save_every, 1))
        set_attribute("_callbacks", [])
        set_attribute("_committed", _NO_COMMIT)
        set_attribute("_staged", _NO_COMMIT)
        set_attribute("_in_run", False)
        set_attribute("_loaded", False)
        set_attribute("_folders", ())
        set_attribute("_shared", None)
        lasting.register(self)
        resume = coordinator().resume
        if resume is not None:
            self._resume(Path(resume.path), trusted=resume.trusted)

    @classmethod
    def _is_reserved(cls, name: str) -> bool:
        """Whether no value can have this name."""
        return name.startswith("_") or hasattr(cls, name)

    # -- values --------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(_unknown(name, objects))
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            super().__setattr__(name, value)
        elif name in self._objects:
            self._objects[name] = value
        else:
            raise AttributeError(_unknown(name, self._objects))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._objects})

    def __repr__(self) -> str:
        names = ", ".join(self._objects)
        return f"<nbdist.elastic.State of {names}; commit {self._committed.number}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the values without the copies, for a rank that joins."""
        fresh = {"_committed": _NO_COMMIT, "_staged": _NO_COMMIT, "_in_run": False}
        return {**self.__dict__, **fresh, "_folders": (), "_shared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        lasting.register(self)

    def on_reset(self, callback: OnReset) -> None:
        """Register a function that every rank calls after a restore.

        Args:
            callback: called as `callback(old_size, new_size)`. `old_size` is the size
                of the world that made the restored commit, so that the callback can
                scale a learning rate.
        """
        self._callbacks.append(callback)

    # -- commits in memory ---------------------------------------------------------

    @property
    def commits(self) -> int:
        """The number of the last commit; 0 before the first."""
        return self._commit_number

    @property
    def _commit_number(self) -> int:
        return int(self._committed.number)

    def commit(self) -> None:
        """Keep the current values. Every rank must call, with equal values.

        A commit has two phases. First each rank copies its values. Then all ranks wait
        until each has its copy. Whenever a rank dies, all other ranks can therefore
        restore the same commit. Within `nbdist.elastic.run`, a change of the world's
        size takes place here.

        Raises:
            OSError: rank 0 could not write to `path`. Only rank 0 raises it, and the
                commit in memory is complete.
        """
        world = ranks()
        self._stage(world)
        wanted = world.any(self._in_run and coordinator().resize_wanted)
        self._complete()
        if world.rank == 0:
            internal_metrics.mark(
                "commit", f"commit {self._commit_number}", of_world=True
            )
        self._save_if_due(world)
        if wanted and self._in_run:
            raise SizeChange

    def restore(self) -> None:
        """Restore the values of the last commit. Any rank may call it alone.

        Raises:
            UsageError: there is no commit.
        """
        if not self._committed.number:
            raise UsageError("there is nothing to restore: call commit() first")
        for name, values in self._committed.values.items():
            self._load_object(name, values)

    def sync(self, source: int = 0) -> None:
        """Copy the source rank's values to all ranks, and commit them.

        Every rank must call.
        """
        world = ranks()
        own = self._capture() if world.rank == source else {}
        values = broadcast_tree(own, source)
        number = max(world.all_gather(self._committed.number)) + 1
        for name, value in values.items():
            # The source's own sampler divides its samples at a load, and its optimizer
            # makes the next step as the other ranks' do.
            live = self._objects[name]
            if world.rank != source or _is_stateful(live):
                self._load_object(name, tree.in_classes_of(live, value))
        self._stage(world)
        self._staged = replace(self._staged, number=number)
        world.barrier("elastic_sync")
        self._complete()

    def _stage(self, world: Ranks) -> None:
        """The first phase of a commit: overwrite the older copy with the values."""
        shares = world.rank == 0 and self._folders
        spare = {} if shares else self._staged.values
        self._staged = _NO_COMMIT  # the copy is incomplete until the end
        current = self._capture()
        values = self._stage_shared(current) if shares else None
        if values is None:
            values = {
                name: tree.copy_into(spare.get(name), value)
                for name, value in current.items()
            }
        self._staged = Commit(self._committed.number + 1, world.size, values)

    def _stage_shared(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Copy the values to a file that outlives this process; None on failure."""
        if self._shared is None:
            self._shared = SharedCopies(self._folders)
        try:
            return self._shared.stage(values)
        except NotShared as reason:
            self._give_up_sharing(reason)
            return None

    def _complete(self) -> None:
        """The second phase of a commit: make the staged copy the commit."""
        with defer_interrupts():
            self._committed, self._staged = self._staged, self._committed
            self._forget_staged()
            try:
                if self._shared is not None:
                    self._shared.install(self._committed)
            except NotShared as reason:
                self._give_up_sharing(reason)

    def _share(self, folders: Sequence[Path]) -> None:
        """Keep rank 0's copies in one of these folders, from the next commit on."""
        self._folders = folders

    def _unshare(self) -> None:
        """Keep the copies in this process's memory. Existing files stay."""
        shared, self._shared, self._folders = self._shared, None, ()
        if shared is not None:
            own = tree.clone(self._committed.values)
            self._committed = replace(self._committed, values=own)
            self._staged = _NO_COMMIT

    def _give_up_sharing(self, reason: NotShared) -> None:
        shared = self._shared
        self._unshare()
        if shared is not None:
            shared.withdraw()
        warnings.warn(
            f"a death of all ranks at once will lose this run's commits: {reason}",
            stacklevel=2,
        )

    def _forget_staged(self) -> None:
        """Forget the staged commit. The next commit uses its memory again."""
        self._staged = replace(self._staged, number=0)

    def _begin_again(self) -> None:
        pass  # what is half done, `_agree` completes

    def _progress(self) -> tuple[Hashable, Any]:
        return tuple(self._objects), (self._committed.number, self._staged.number)

    def _agree(self, everyones: Sequence[Any]) -> None:
        """Complete the last commit that any rank has completed.

        An interrupt can end `commit` on this rank when all ranks have staged it.
        """
        last = max(committed for committed, _ in filter(None, everyones))
        if self._committed.number < last == self._staged.number:
            self._complete()
        self._forget_staged()

    def _drop_commit(self) -> None:
        self._committed = _NO_COMMIT

    def _capture(self) -> dict[str, Any]:
        """Return the values as a tree that shares the live tensors."""
        return {name: _captured(value) for name, value in self._objects.items()}

    def _load_object(self, name: str, values: Any) -> None:
        self._objects[name] = _load_into(self._objects[name], values)

    def _call_back(self, old_size: int, new_size: int) -> None:
        for callback in self._callbacks:
            callback(old_size, new_size)

    def _unwrap(self) -> None:
        """Replace each DDP module, whose ranks may be gone, by the wrapped module."""
        for name, value in self._objects.items():
            self._objects[name] = _unwrapped(value)

    # -- the rendezvous of an elastic run ------------------------------------------

    def _rendezvous(self, function: str, *, joins: bool, begins: bool) -> None:
        """Agree with all ranks on one commit, and restore it. Every rank must call.

        When all ranks begin, rank 0's values become the commit. Later, the commit is
        the last one that any rank has completed. When one rank has completed a commit,
        all others have at least staged it. Ranks that lack the commit get it from the
        lowest rank that has it.

        Args:
            function: the name of the elastic function, which must agree on all ranks.
            joins: whether this rank was started while the others were in the run.
            begins: whether this rank has made no commit in the run yet.

        Raises:
            UsageError: the ranks have called different functions, or have states with
                different names.
        """
        world = ranks()
        world.barrier("elastic_meeting")
        numbers = self._committed.number, self._staged.number
        mine = _Progress(function, tuple(self._objects), *numbers, joins, begins)
        every: list[_Progress] = world.all_gather(mine)
        _check_agreement(every)
        old = [rank for rank, each in enumerate(every) if not each.joins]
        if all(every[rank].begins for rank in old):
            self._begin_run(world, old[0])
            return
        last = max(every[rank].committed for rank in old)
        if not joins and self._committed.number < last == self._staged.number:
            self._complete()  # another rank has completed it
        self._forget_staged()
        lacks = [
            each.joins or last not in (each.committed, each.staged) for each in every
        ]
        if any(lacks):
            self._send_commit(world, lacks)
        self._unwrap()
        self.restore()
        self._call_back(self._committed.size, world.size)

    def _begin_run(self, world: Ranks, source: int) -> None:
        before, loaded = self._committed.size, self._loaded
        self._loaded = False
        self.sync(source)
        if loaded and before != world.size:
            self._call_back(before, world.size)

    def _send_commit(self, world: Ranks, lacks: Sequence[bool]) -> None:
        """Send the commit from the lowest rank that has it to the ranks that do not.

        Args:
            lacks: whether each rank lacks the commit, in rank order.
        """
        commit = self._committed
        source = lacks.index(False)
        number, size = world.broadcast((commit.number, commit.size), source)
        values = broadcast_tree(commit.values, source)
        if lacks[world.rank]:
            for name, value in values.items():
                values[name] = tree.in_classes_of(self._objects.get(name), value)
            self._committed = Commit(number, size, values)

    # -- files ---------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write rank 0's current values to a file. Every rank must call.

        The other ranks wait. When this returns, any rank can load the file. The
        previous file is kept as PATH.previous. A reader never sees an incomplete file.

        Raises:
            SaveError: rank 0 could not write. Every rank raises it, with the reason.
        """
        world = ranks()

        def write() -> None:
            commit = Commit(self._committed.number, world.size, self._capture())
            _write_commit(Path(path), commit)

        write_on_rank_0(
            path, write, world.rank, lambda problem: world.broadcast(problem, 0)
        )

    def load(self, path: str | os.PathLike[str], *, trusted: bool = False) -> None:
        """Load the values from a file that was written in a world of any size.

        Any rank may call it alone. If the file is damaged or incomplete, the previous
        file is loaded, with a warning.

        Args:
            path: the file.
            trusted: also unpickle objects that are not tensors or plain values. The
                file can then run any code.

        Raises:
            CheckpointError: neither file is complete, or the file has other names than
                this state.
        """
        opened = checkpoint.check(Path(path))
        if opened.refused:
            warnings.warn(
                f"{opened.refused}; {opened.path} is used instead", stacklevel=2
            )
        self._load_file(opened, trusted=trusted)

    def _resume(self, path: Path, *, trusted: bool) -> None:
        opened = checkpoint.check(path)
        if trusted and set(opened.header["names"]) != self._objects.keys():
            return  # a commit that the cluster has kept, of another State
        self._load_file(opened, trusted=trusted)
        if ranks().rank == 0 and not trusted:
            when = time.strftime(
                "%Y-%m-%d %H:%M", time.localtime(opened.header["time"])
            )
            print(f"resumed from {opened.path}: commit {self._commit_number} of {when}")

    def _load_file(self, opened: checkpoint.Opened, *, trusted: bool) -> None:
        names = opened.header["names"]
        if sorted(names) != sorted(self._objects):
            raise CheckpointError(
                f"{opened.path} holds {', '.join(names)}, and this State has "
                f"{', '.join(self._objects)}: give State the same names"
            )
        values = _values_in(opened, trusted=trusted)
        for name in names:
            values[name] = tree.in_classes_of(self._objects[name], values[name])
            self._load_object(name, values[name])
        header = opened.header
        self._committed = Commit(max(1, header["commit"]), header["size"], values)
        self._loaded = True
        self._forget_staged()

    def _save_if_due(self, world: Ranks) -> None:
        if world.rank != 0 or self._path is None:
            return
        due = self._commit_number % self._save_every == 0
        if due or coordinator().save_wanted:
            coordinator().save_wanted = False
            _write_commit(self._path, self._committed)


def _unknown(name: str, objects: dict[str, Any]) -> str:
    has = ", ".join(objects) or "nothing"
    return f"this State has no {name!r}, only {has}: pass it to State({name}=...)"


# -- the values of one object ------------------------------------------------------


def _unwrapped(value: Any) -> Any:
    """The module that a DDP wraps; any other value unchanged."""
    return value.module if isinstance(value, DistributedDataParallel) else value


def _captured(live: Any) -> Any:
    """The values of an object as a tree that shares its tensors."""
    live = _unwrapped(live)
    if keras_models.is_model(live):
        return keras_models.model_state(live)
    return live.state_dict() if _is_stateful(live) else live


def _load_into(live: Any, values: Any) -> Any:
    """Load values into an object, without keeping a reference to them.

    Returns:
        The object itself if it could be changed in place, else a copy of the values.
    """
    inner = _unwrapped(live)
    if keras_models.is_model(inner):
        keras_models.load_model_state(inner, values)
    elif isinstance(inner, nn.Module):
        inner.load_state_dict(values)
    elif _is_stateful(inner):
        # An optimizer keeps a reference to the tensors that it loads.
        inner.load_state_dict(tree.clone(values))
    elif isinstance(inner, Tensor) and _is_alike(inner, values):
        with torch.no_grad():
            inner.copy_(values)
    else:
        return tree.clone(values)
    return live


def _is_stateful(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_alike(live: Tensor, values: object) -> bool:
    """Whether values can be copied into a tensor. An expanded tensor is read-only."""
    dimensions = zip(live.shape, live.stride(), strict=True)
    return (
        isinstance(values, Tensor)
        and live.shape == values.shape
        and live.dtype == values.dtype
        and all(stride or size < 2 for size, stride in dimensions)
    )


# -- what the ranks compare --------------------------------------------------------


@dataclass(frozen=True)
class _Progress:
    """A rank's progress, which the ranks exchange at the rendezvous."""

    function: str
    """The name of the elastic function."""
    names: tuple[str, ...]
    """The names of the state's values."""
    committed: int
    staged: int
    joins: bool
    begins: bool

    def __str__(self) -> str:
        return f"{self.function} with a State of {', '.join(self.names) or 'nothing'}"


def _check_agreement(every: Sequence[_Progress]) -> None:
    """Raise UsageError unless all ranks have the same function and the same names."""
    first = every[0]
    for rank, other in enumerate(every):
        if (other.function, other.names) != (first.function, first.names):
            raise UsageError(
                f"rank 0 called {first}, and rank {rank} {other}: all ranks must call "
                "the same elastic function, with a State of the same names"
            )


# -- files of saved state ----------------------------------------------------------


def _write_commit(path: Path, commit: Commit) -> None:
    """Write a commit to a file of saved state."""
    payload = io.BytesIO()
    torch.save(tree.readable(commit.values), payload)
    header = {
        "commit": commit.number,
        "size": commit.size,
        "names": list(commit.values),
        "time": time.time(),
    }
    checkpoint.write(path, header, payload.getbuffer())


def _values_in(opened: checkpoint.Opened, *, trusted: bool) -> dict[str, Any]:
    """The values in a file of saved state, or in a record of a running cluster.

    Args:
        trusted: also load objects other than tensors and plain values.

    Raises:
        CheckpointError: the values cannot be loaded.
    """
    if not is_record(opened.header):
        return _read_values(opened, trusted=trusted)
    if not trusted:
        raise CheckpointError(
            f"{opened.path} is a part of a running cluster, not a file of saved state: "
            "load a file that state.save() has written"
        )
    return read_shared(opened)


def _read_values(opened: checkpoint.Opened, *, trusted: bool) -> dict[str, Any]:
    with checkpoint.read(opened) as file:
        payload = io.BytesIO(file.read())
    try:
        with warnings.catch_warnings():
            # torch 2.14 says that it checks sparse tensors. The user cannot change it.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            values: dict[str, Any] = torch.load(
                payload, map_location=own_device, weights_only=not trusted
            )
    except Exception as error:  # unpickling may raise anything; the digest was right
        hint = (
            "" if trusted else "; if you trust the file, state.load(path, trusted=True)"
        )
        raise CheckpointError(
            f"{opened.path} cannot be loaded: {error}{hint}"
        ) from error
    if not isinstance(values, dict) or values.keys() != set(opened.header["names"]):
        raise CheckpointError(f"{opened.path} does not hold what its header names")
    return values
