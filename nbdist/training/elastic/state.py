"""What a training must not lose, and its last commit."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist.errors import CheckpointError, UsageError
from nbdist.training import checkpoint, commit_files
from nbdist.training._uncut import uncut
from nbdist.training._whole import whole
from nbdist.training.elastic import tree
from nbdist.training.elastic.commit import Commit, read_values, write_commit
from nbdist.training.elastic.coordinator import coordinator
from nbdist.training.elastic.ranks import Ranks, broadcast_tree, ranks
from nbdist.training.elastic.shared_copies import (
    NotShared,
    SharedCopies,
    read_shared,
)
from nbdist.training.elastic.values import captured, put, unwrapped
from nbdist.training.files import write_on_rank_0

__all__ = ["SizeChange", "State"]

OnReset = Callable[[int, int], object]


class SizeChange(BaseException):
    """Leaves the training at a commit, so that the world can change its size.

    No `except Exception` of the training may catch it.
    """


class State:
    """Values that survive the death of a rank, and a change of the world's size.

    `commit` keeps a copy of all of them in each rank's memory; `restore` puts the last
    one back. Each value is an attribute: `state.epoch += 1`.

    Two copies are kept beside the live values, so that one of them is always whole. In
    a notebook's elastic run, those of rank 0 lie in files that outlive all ranks.

    Args:
        path: where each commit that is due is also written, by rank 0.
        save_every: how many commits make one due.
        objects: what has `state_dict` and `load_state_dict` (modules, optimizers,
            schedulers, samplers, gradient scalers), tensors, and plain values, which
            are deep-copied. A module in DDP is saved and restored as the module it
            wraps.

    Raises:
        UsageError: a name is taken, or a number out of range.
        CheckpointError: the cluster resumes from a file that does not fit.
    """

    _objects: dict[str, Any]
    _path: Path | None
    _save_every: int
    _callbacks: list[OnReset]
    _committed: Commit
    _staged: Commit
    _runs: bool
    _loaded: bool
    _folders: Sequence[Path]
    """Where rank 0's copies may lie; none where they need not outlive it."""
    _shared: SharedCopies | None

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        save_every: int = 1,
        **objects: Any,
    ) -> None:
        for name in objects:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(
                    f"State has a {name!r} of its own: give the value another name"
                )
        put = super().__setattr__
        put("_objects", dict(objects))
        put("_path", None if path is None else Path(path))
        put("_save_every", whole("save_every", save_every, 1))
        put("_callbacks", [])
        put("_committed", Commit(0, 0, {}))
        put("_staged", Commit(0, 0, {}))
        put("_runs", False)
        put("_loaded", False)
        put("_folders", ())
        put("_shared", None)
        resume = coordinator().resume
        if resume is not None:
            self._resume(Path(resume.path), trusted=resume.trusted)

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
        """For a rank that joins: the values travel, the copies do not."""
        nothing = Commit(0, 0, {})
        fresh = {"_committed": nothing, "_staged": nothing, "_runs": False}
        return {**self.__dict__, **fresh, "_folders": (), "_shared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def on_reset(self, callback: OnReset) -> None:
        """Have `callback(old_size, new_size)` called on every rank after a restore.

        `old_size` is that of the world which made the commit that was restored: so a
        learning rate can be scaled to the new size.
        """
        self._callbacks.append(callback)

    # -- in memory -----------------------------------------------------------------

    @property
    def commits(self) -> int:
        """The number of the last commit; 0 before the first."""
        return int(self._committed.number)

    def commit(self) -> None:
        """Keep the values as they are now. Every rank must call, with equal values.

        In two phases: each rank copies, then all agree that each has. So whenever a
        rank dies, all others have the values of the same commit. Within
        `nbdist.elastic.run`, a change of the world's size takes place here.
        """
        world = ranks()
        self._stage(world)
        wanted = world.agree(self._runs and coordinator().resize_wanted)
        self._swap()
        self._save_if_due(world)
        if wanted and self._runs:
            raise SizeChange

    def restore(self) -> None:
        """Put the values of the last commit back. No rank needs another for it.

        Raises:
            UsageError: there was no commit.
        """
        if not self._committed.number:
            raise UsageError("there is nothing to restore: call commit() first")
        for name, values in self._committed.values.items():
            self._put(name, values)

    def sync(self, source: int = 0) -> None:
        """Give every rank the source's values, and commit them. All ranks must call."""
        world = ranks()
        own = self._capture() if world.rank == source else {}
        values = broadcast_tree(own, source)
        number = max(world.gather(self._committed.number)) + 1
        if world.rank != source:
            for name, value in values.items():
                self._put(name, value)
        self._stage(world)
        self._staged = replace(self._staged, number=number)
        world.meet("elastic_sync")
        self._swap()

    def _stage(self, world: Ranks) -> None:
        """The first phase: copy the values into the copy that is not the commit."""
        shares = world.rank == 0 and self._folders
        spare = {} if shares else self._staged.values
        self._staged = Commit(0, 0, {})  # it holds a mixture until the end
        current = self._capture()
        values = self._stage_shared(current) if shares else None
        if values is None:
            values = {
                name: tree.copy_into(spare.get(name), value)
                for name, value in current.items()
            }
        self._staged = Commit(self._committed.number + 1, world.size, values)

    def _stage_shared(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Copy to where it outlives this process; None where it cannot."""
        if self._shared is None:
            self._shared = SharedCopies(self._folders)
        try:
            return self._shared.stage(values)
        except NotShared as reason:
            self._give_up_sharing(reason)
            return None

    def _swap(self) -> None:
        """The second phase: what was staged is the commit."""
        with uncut():
            self._committed, self._staged = self._staged, self._committed
            self._forget_staged()
            try:
                if self._shared is not None:
                    self._shared.install(self._committed)
            except NotShared as reason:
                self._give_up_sharing(reason)

    def _share(self, folders: Sequence[Path]) -> None:
        """From the next commit on, keep rank 0's copies in one of these folders."""
        self._folders = folders

    def _unshare(self) -> None:
        """Keep the copies in this process's memory; the files stay as they are."""
        shared, self._shared, self._folders = self._shared, None, ()
        if shared is not None:
            own = tree.clone(self._committed.values)
            self._committed = replace(self._committed, values=own)
            self._staged = Commit(0, 0, {})

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
        """Keep the memory, not the number."""
        self._staged = replace(self._staged, number=0)

    def _forget(self) -> None:
        """Have no commit."""
        self._committed = Commit(0, 0, {})

    def _capture(self) -> dict[str, Any]:
        """The values as a tree that shares their tensors."""
        return {name: captured(value) for name, value in self._objects.items()}

    def _put(self, name: str, values: Any) -> None:
        self._objects[name] = put(self._objects[name], values)

    def _call_back(self, old_size: int, new_size: int) -> None:
        for callback in self._callbacks:
            callback(old_size, new_size)

    def _unwrap(self) -> None:
        """Take modules out of a DDP that belongs to ranks of before."""
        for name, value in self._objects.items():
            self._objects[name] = unwrapped(value)

    # -- in files ------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the values as they are now to a file. Every rank must call.

        Rank 0 writes its own values, and the others wait: when this returns, any rank
        can load the file. The file that was there before stays as PATH.previous. A file
        is whole or not there.

        Raises:
            SaveError: rank 0 could not write; raised on every rank, with the reason.
        """
        world = ranks()

        def write() -> None:
            commit = Commit(self._committed.number, world.size, self._capture())
            write_commit(Path(path), commit)

        write_on_rank_0(path, write, world.rank, lambda told: world.send(told, 0))

    def load(self, path: str | os.PathLike[str], *, trusted: bool = False) -> None:
        """Take the values from a file, written in a world of any size.

        Each rank reads it by itself. A damaged or half-written file is refused, and the
        previous one is used, with a warning.

        Args:
            trusted: also load objects other than tensors and plain values, as pickle
                does: the file can then run any code.

        Raises:
            CheckpointError: neither file is whole, or it is that of another State.
        """
        opened = checkpoint.check(Path(path))
        if opened.refused:
            warnings.warn(
                f"{opened.refused}; {opened.path} is used instead", stacklevel=2
            )
        self._take(opened, trusted=trusted)

    def _resume(self, path: Path, *, trusted: bool) -> None:
        opened = checkpoint.check(path)
        if trusted and set(opened.header["names"]) != self._objects.keys():
            return  # a commit that the cluster has kept itself, of another state
        self._take(opened, trusted=trusted)
        if ranks().rank == 0 and not trusted:
            when = time.strftime(
                "%Y-%m-%d %H:%M", time.localtime(opened.header["time"])
            )
            print(f"resumed from {opened.path}: commit {self.commits} of {when}")

    def _take(self, opened: checkpoint.Opened, *, trusted: bool) -> None:
        names = opened.header["names"]
        if sorted(names) != sorted(self._objects):
            raise CheckpointError(
                f"{opened.path} holds {', '.join(names)}, and this State has "
                f"{', '.join(self._objects)}: give State the same names"
            )
        values = _values_of(opened, trusted=trusted)
        for name in names:
            self._put(name, values[name])
        header = opened.header
        self._committed = Commit(max(1, header["commit"]), header["size"], values)
        self._loaded = True
        self._forget_staged()

    def _save_if_due(self, world: Ranks) -> None:
        due = self._path is not None and self.commits % self._save_every == 0
        if world.rank == 0 and due:
            assert self._path is not None
            write_commit(self._path, self._committed)


def _values_of(opened: checkpoint.Opened, *, trusted: bool) -> dict[str, Any]:
    if not commit_files.is_record(opened.header):
        return read_values(opened, trusted=trusted)
    if not trusted:
        raise CheckpointError(
            f"{opened.path} is a part of a running cluster: load a file that "
            "state.save() has written"
        )
    return read_shared(opened)


def _unknown(name: str, objects: dict[str, Any]) -> str:
    has = ", ".join(objects) or "nothing"
    return f"this State has no {name!r} but {has}: give it to State({name}=...)"
