"""Sends large values between processes of one host in a file that all of them map.

A shipment has either the pickled frames or the path of a file with the frames. The file
is in the cluster's folder in shared memory if it has room, else in the run folder. If
neither has room, the frames are part of the message. Receivers map the file
copy-on-write, so they need no copy and do not see each other's changes. The file is
removed when all receivers have mapped it, and at the latest with its folder.

Frames are unpickled, so a file is opened only if no other user can have written it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.ipc import private_files, serialization
from nbdist.ipc.host_sockets import HOST
from nbdist.ipc.own_memory import Unreadable

__all__ = ["Shipment", "discard", "frames_of", "load", "new_file", "unload"]

FILE_FROM_BYTES = 1 << 20
ALIGNMENT = 64


@dataclass(frozen=True)
class Shipment:
    """Frames of `serialization.dumps`, or the file that holds them."""

    frames: tuple[bytes, ...] = ()
    path: str | None = None
    sizes: tuple[int, ...] = ()
    """Bytes of each frame in the file. Frames begin at multiples of 64 bytes."""
    host: str = ""
    """The host that has the file, if the cluster has several."""

    @property
    def file_bytes(self) -> int:
        """The size of the file."""
        return sum(map(_padded, self.sizes))


serialization.PLAIN.add(Shipment)


def load(frames: list[Any], run_dir: Path) -> Shipment:
    """Pack frames into a shipment: small frames directly, others into a file.

    Raises:
        Unreadable: A frame's memory cannot be read.
    """
    sizes = tuple(memoryview(frame).nbytes for frame in frames)
    if sum(sizes) >= FILE_FROM_BYTES:
        for folder in _folders(sum(map(_padded, sizes)), run_dir):
            try:
                path, host = _write(frames, folder), os.environ.get(HOST, "")
            except OSError as error:
                # `write` gives this error where a plain read would end the process.
                if error.errno == errno.EFAULT:
                    raise Unreadable("its memory has become unreadable") from error
            else:
                return Shipment(path=path, sizes=sizes, host=host)
    return Shipment(frames=tuple(bytes(frame) for frame in frames))


@contextlib.contextmanager
def new_file(size: int, run_dir: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Write the file of a shipment that arrives from another host in a `with` block.

    Args:
        size: Its bytes.
        run_dir: The cluster's run folder on this host.

    Yields:
        The path and the file, open for writing. An error in the block removes it.

    Raises:
        OSError: No folder has room.
    """
    folder, *_ = _folders(size, run_dir)
    descriptor, path = _make(folder)
    try:
        with open(descriptor, "wb") as file:
            yield path, file
    except BaseException:
        os.unlink(path)
        raise


def unload(shipment: Shipment) -> Any:
    """The value that `serialization.dumps` pickled. Its arrays are writable.

    Tensors of GPUs come into host memory: the notebook makes no context of CUDA, which
    would take memory of a rank's GPU, or be refused.

    Raises:
        OSError: The file is gone, or another user may have written it.
    """
    return serialization.loads(frames_of(shipment), on_host=True)


def frames_of(shipment: Shipment) -> list[Any]:
    """The frames, writable and private to this process.

    Raises:
        OSError: The file is gone, or another user may have written it.
    """
    if shipment.path is None:
        return [bytearray(frame) for frame in shipment.frames]
    descriptor = private_files.open_file(Path(shipment.path))
    try:
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    view, frames, begin = memoryview(mapped), [], 0
    for size in shipment.sizes:
        frames.append(view[begin : begin + size])
        begin += _padded(size)
    return frames


def discard(shipment: Shipment) -> None:
    """Remove the file. Call once every receiver has mapped it."""
    if shipment.path is not None:
        Path(shipment.path).unlink(missing_ok=True)


def _make(folder: Path) -> tuple[int, str]:
    """A new file that this user can open again, whatever umask a cell has set."""
    descriptor, path = tempfile.mkstemp(dir=folder)
    os.fchmod(descriptor, 0o600)
    return descriptor, path


def _write(frames: list[Any], folder: Path) -> str:
    """Write frames to a new file, each at a multiple of 64 bytes; return its path."""
    descriptor, path = _make(folder)
    try:
        # `write` raises on a full disk, while a mapped page would raise SIGBUS.
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for frame in frames:
                octets = memoryview(frame).cast("B")
                _write_all(file, octets)
                file.seek(_padded(octets.nbytes) - octets.nbytes, os.SEEK_CUR)
            file.truncate()
    except BaseException:
        os.unlink(path)
        raise
    return path


def _write_all(file: io.FileIO, octets: memoryview) -> None:
    while octets:
        octets = octets[file.write(octets) :]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _folders(total: int, run_dir: Path) -> Iterator[Path]:
    """The folders to try for a file of `total` bytes. Memory must stay half empty."""
    memory = private_files.memory_folder(run_dir)
    if memory != run_dir and shutil.disk_usage(memory).free > 2 * total:
        yield memory
    yield run_dir
