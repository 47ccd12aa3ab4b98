"""Rank 0's copies of the committed values, in files that outlive its process.

A commit copies the values to memory that is mapped from a file. The file stays when the
process is killed, so the copy survives the death of all ranks. `commit_files` describes
the files.

There are two copies, each in a data file. The process writes only to the file that the
record does not name. Whenever the process is killed, the record names a complete copy:

    while values are copied         the previous commit, whose file is not written to
    between copying and the rename  the previous commit
    after the rename                the new commit
    while a data file is replaced   the previous commit, in the other file

A commit with other shapes gets a new layout in the spare file, or a new file.

When a cluster ends because of a failure, the notebook moves the folders away. From then
on no commit completes, because the training will continue from an older one.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import pickle
import secrets
import shutil
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nbdist.errors import CheckpointError, ClusterError
from nbdist.ipc.locks import Event
from nbdist.training.elastic import checkpoint, tree
from nbdist.training.elastic.commit_files import (
    RECORD,
    Commit,
    Record,
    read_record,
    write_record,
)

__all__ = ["NotShared", "SharedCopies", "read_shared"]

ALIGNMENT = 64
GROWTH_BYTES = 16 << 20
"""The most bytes that a file has in reserve, for values that grow."""
END_TIMEOUT_S = 30.0
"""Seconds in which the notebook must end a rank whose folders were moved away."""
PROTOCOL = 2  # torch.load(weights_only=True) reads this one

_rebuild: Callable[..., Tensor] = torch._utils._rebuild_tensor_v3


class NotShared(Exception):
    """The files cannot be written. The message has the reason."""


class SharedCopies:
    """Two copies of the values: the commit, and a spare copy for the next commit.

    Args:
        folders: folders to which only this user can write. The first with enough room
            gets the files.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._recorded = _Copy()
        self._spare = _Copy()
        self._has_new_file = True
        self._pickled = b""

    def stage(self, values: dict[str, Any]) -> dict[str, Any]:
        """Copy values into the spare file.

        Tensors on a GPU are also copied on the GPU, so that a restore needs no
        transfer.

        Returns:
            The copy.

        Raises:
            NotShared: no folder has room for the file, or a value cannot be pickled.
            ClusterError: the folders were moved away, see `install`.
        """
        skeleton, tensors = tree.split(values)
        skeleton = tree.clone(skeleton)
        if not self._spare.fits(tensors):
            self._lay_out(tensors)
        copied: dict[str, Any] = tree.unite(skeleton, self._spare.fill(tensors))
        self._pickled = self._spare.pickled(tree.readable(copied))
        return copied

    def _lay_out(self, tensors: Sequence[Tensor]) -> None:
        try:
            is_new = self._spare.lay_out(tensors, self._folders)
        except OSError as error:
            self._check_folders()
            raise NotShared(str(error)) from error
        path = self._spare.path
        if is_new and path is not None and path.parent != self._folders[0]:
            warnings.warn(
                f"commits are kept in {path.parent.parent} and may be slow: "
                f"{self._folders[0].parent} has too little room",
                stacklevel=2,
            )
        self._has_new_file |= is_new

    def install(self, commit: Commit) -> None:
        """Make the staged copy the commit that survives.

        The caller must defer interrupts, see `defer_interrupts`.

        Raises:
            NotShared: there was no room for the record. The previous commit stays.
            ClusterError: the notebook has moved the folders away, because the cluster
                ends, and has not ended this rank within `END_TIMEOUT_S`.
        """
        copy = self._spare
        assert copy.path is not None
        try:
            write_record(copy.path.parent, copy.record(commit, self._pickled))
        except OSError as error:
            self._check_folders()
            raise NotShared(str(error)) from error
        self._spare, self._recorded = self._recorded, copy
        if self._has_new_file:
            self._remove_others(copy.path.parent / RECORD)
            self._has_new_file = False

    def _check_folders(self) -> None:
        """Wait for the end of this process if all folders were moved away."""
        if any(folder.is_dir() for folder in self._folders):
            return
        Event().wait(END_TIMEOUT_S)
        raise ClusterError(
            f"this commit is not kept: its folder in {self._folders[0].parent} is "
            "gone, because the notebook ends this cluster: start it again"
        )

    def withdraw(self) -> None:
        """Remove the files, so that no commit survives."""
        self._recorded, self._spare = _Copy(), _Copy()
        self._remove_others(None)

    def _remove_others(self, record: Path | None) -> None:
        """Remove all other files, such as those of a former rank 0.

        Args:
            record: the record to keep; None for none.
        """
        kept = {record, self._recorded.path, self._spare.path}
        found = [path for folder in self._folders for path in _files(folder)]
        # Remove records first, so that no record names a file that was removed.
        for path in sorted(found, key=lambda path: path.name != RECORD):
            if path not in kept:
                path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # the notebook has removed the folder
        return list(folder.iterdir())
    return []


class _Slot(NamedTuple):
    """The position of a tensor in a data file."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    size: int
    """In bytes."""


class _Storage(NamedTuple):
    """A placeholder in a pickle for a part of the data file."""

    key: str
    device: str
    size: int


class _Copy:
    """The tensors of one copy, and the file in which they lie."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._memory: Tensor | None = None
        """The file's bytes."""
        self._kinds: list[object] = []
        self._slots: list[_Slot] = []
        self._shared: list[Tensor] = []
        """The tensors in the file."""
        self._own: list[Tensor] = []
        """The tensors of the copy: in the file, or on the GPU for those on a GPU."""

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the current layout fits these tensors."""
        return self.path is not None and self._kinds == _kinds(tensors)

    def lay_out(self, tensors: Sequence[Tensor], folders: Sequence[Path]) -> bool:
        """Lay the tensors out in the file; return whether the file is new.

        Raises:
            OSError: there is no room for a new file.
        """
        self._kinds, self._shared, self._own = [], [], []
        slots, needed = _plan(tensors)
        is_new = self._memory is None or self._memory.numel() < needed
        if is_new:
            self._replace_file(needed, folders)
        assert self._memory is not None
        self._slots = slots
        self._shared = [_view(self._memory, slot) for slot in slots]
        self._own = [
            shared if tensor.device.type == "cpu" else torch.empty_like(tensor)
            for shared, tensor in zip(self._shared, tensors, strict=True)
        ]
        self._kinds = _kinds(tensors)
        return is_new

    def _replace_file(self, needed: int, folders: Sequence[Path]) -> None:
        self._memory = None  # the last tensor frees the pages
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None
        size = needed + min(needed // 8, GROWTH_BYTES)
        self.path, self._memory = _new_file(max(size, ALIGNMENT), folders)

    def fill(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy the tensors; return the copies, each on its tensor's device."""
        with torch.no_grad():
            if tensors:
                torch._foreach_copy_(self._shared, list(tensors))  # the host waits
            for own, shared, tensor in zip(
                self._own, self._shared, tensors, strict=True
            ):
                if own is not shared:
                    own.copy_(tensor)
        return self._own

    def pickled(self, values: dict[str, Any]) -> bytes:
        """Pickle values that hold the copies.

        Raises:
            NotShared: a value cannot be pickled.
        """
        file = io.BytesIO()
        try:
            _Pickler(file, self._own, self._slots).dump(values)
        except Exception as error:  # an object's pickling may raise anything
            raise NotShared(f"{type(error).__name__}: {error}") from error
        return file.getvalue()

    def record(self, commit: Commit, pickled: bytes) -> Record:
        """The record of a commit that lies in this copy's file."""
        assert self.path is not None
        return Record(
            commit=commit.number,
            size=commit.size,
            names=tuple(commit.values),
            time=time.time(),
            data=self.path.name,
            parts=tuple((slot.offset, slot.size) for slot in self._slots),
            pickled=pickled,
        )


def _kinds(tensors: Sequence[Tensor]) -> list[object]:
    return [(each.shape, each.stride(), each.dtype, each.device) for each in tensors]


def _plan(tensors: Sequence[Tensor]) -> tuple[list[_Slot], int]:
    """Lay tensors out in a file.

    Each tensor gets the strides that `Tensor.clone` would give it.

    Returns:
        The slot of each tensor, and the size of the file in bytes.
    """
    slots, end = [], 0
    for tensor in tensors:
        strides = torch.empty_like(tensor, device="meta").stride()
        size = math.prod(tensor.shape) * tensor.element_size()
        slots.append(_Slot(tuple(tensor.shape), strides, tensor.dtype, end, size))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return slots, end


def _view(memory: Tensor, slot: _Slot) -> Tensor:
    part = memory[slot.offset : slot.offset + slot.size].view(slot.dtype)
    return part.as_strided(slot.shape, slot.strides)


def _new_file(size: int, folders: Sequence[Path]) -> tuple[Path, Tensor]:
    """Make a file of this many bytes, and map its memory.

    Raises:
        OSError: no folder has room. The message has the free space of each.
    """
    refused = []
    for folder in folders:
        try:
            free = shutil.disk_usage(folder).free
            if free > 2 * size:  # leave room for other users of the folder
                return _mapped(folder / secrets.token_hex(8), size)
            refused.append(f"{folder.parent} has {free / 1e6:.0f} MB free")
        except OSError as error:
            refused.append(f"{folder.parent}: {error.strerror or error}")
    raise OSError(
        f"a copy of the state needs {size / 1e6:.0f} MB, and as much again must stay "
        f"free: {', '.join(refused)}"
    )


def _mapped(path: Path, size: int) -> tuple[Path, Tensor]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # whatever umask a cell has set
        # Allocate the pages now. In a full folder, a later write would raise SIGBUS.
        os.posix_fallocate(descriptor, 0, size)
        memory = mmap.mmap(descriptor, size)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return path, torch.frombuffer(memory, dtype=torch.uint8)


class _Pickler(pickle.Pickler):
    """Pickles values as `torch.save` does, with tensors that lie in a data file."""

    def __init__(
        self, file: io.BytesIO, tensors: Sequence[Tensor], slots: Sequence[_Slot]
    ) -> None:
        super().__init__(file, PROTOCOL)
        self._reduced = {
            id(tensor): (_rebuild, _arguments(str(key), slot, str(tensor.device)))
            for key, (tensor, slot) in enumerate(zip(tensors, slots, strict=True))
        }

    def reducer_override(self, value: object) -> Any:
        """Pickle a tensor of the copy as a reference to its storage."""
        return self._reduced.get(id(value), NotImplemented)

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        """The identity of a storage, in the form that `torch.load` reads."""
        if type(value) is not _Storage:
            return None
        return "storage", torch.UntypedStorage, value.key, value.device, value.size


def _arguments(key: str, slot: _Slot, device: str) -> tuple[object, ...]:
    storage = _Storage(key, device, slot.size)
    hooks: OrderedDict[str, object] = OrderedDict()
    return storage, 0, slot.shape, slot.strides, False, hooks, slot.dtype


class _Unpickler(pickle.Unpickler):
    """Unpickles values whose tensors lie in the memory of a data file."""

    def __init__(self, record: Record, memory: Tensor) -> None:
        super().__init__(io.BytesIO(record.pickled))
        self._parts = record.parts
        self._memory = memory

    def persistent_load(self, identity: Any) -> _Storage:
        """The storage of an identity that `_Pickler.persistent_id` has made."""
        _kind, _class, key, device, size = identity
        return _Storage(key, device, size)

    def find_class(self, module: str, name: str) -> Any:
        """Return this object's `_tensor` for the function that rebuilds tensors."""
        if (module, name) == (_rebuild.__module__, _rebuild.__name__):
            return self._tensor
        return super().find_class(module, name)

    def _tensor(self, storage: Any, *arguments: Any) -> Tensor:
        if type(storage) is not _Storage:
            return _rebuild(storage, *arguments)
        _offset, shape, strides, _grad, _hooks, dtype = arguments
        offset, size = self._parts[int(storage.key)]
        view = _view(self._memory, _Slot(shape, strides, dtype, offset, size))
        on_gpu = storage.device.startswith("cuda") and torch.cuda.is_available()
        return view.cuda() if on_gpu else view


def read_shared(opened: checkpoint.Opened) -> dict[str, Any]:
    """Read the values of a commit of this cluster. Its pickle is trusted.

    The tensors are in the file's memory, mapped copy-on-write.

    Raises:
        CheckpointError: the commit cannot be loaded.
    """
    record = read_record(opened)
    try:
        memory = _mapped_privately(opened.path.with_name(record.data))
        values: dict[str, Any] = _Unpickler(record, memory).load()
    except Exception as error:  # whatever unpickling raises
        raise CheckpointError(f"{opened.path} cannot be loaded: {error}") from error
    return values


def _mapped_privately(path: Path) -> Tensor:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)
