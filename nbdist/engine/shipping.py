"""Large values between processes of one host: one file in memory, mapped by all.

A shipment is either the pickled frames themselves or the path of a file that holds
them. The file lies in /dev/shm where there is room, else beside the cluster's other
files. Receivers map it copy-on-write, so nobody copies and nobody sees another's
changes; its name is removed as soon as everybody has it. Should that never come to be,
because a process was killed, the cluster's end removes what bears the cluster's name.
"""

from __future__ import annotations

import io
import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.engine import codec

__all__ = ["Shipment", "discard", "load", "memory_folder", "unload"]

FILE_FROM_BYTES = 1 << 20
ALIGNMENT = 64
MEMORY_FOLDER = Path("/dev/shm")


@dataclass(frozen=True)
class Shipment:
    """Frames of `codec.dumps`, or where they lie."""

    frames: tuple[bytes, ...] = ()
    path: str | None = None
    sizes: tuple[int, ...] = ()
    """Bytes of each frame in the file; each begins at a multiple of 64."""


def load(frames: list[Any], run_dir: Path) -> Shipment:
    """Pack frames: in the message when small, else in a file of the cluster's."""
    sizes = tuple(memoryview(frame).nbytes for frame in frames)
    if sum(sizes) < FILE_FROM_BYTES:
        return Shipment(frames=tuple(bytes(frame) for frame in frames))
    total = sum(_padded(size) for size in sizes)
    folder = _folder(total, run_dir)
    descriptor, path = tempfile.mkstemp(prefix=f"{run_dir.name}-", dir=folder)
    try:
        # Written, not mapped: a full disk is an error here, not a crash at a page.
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for frame, size in zip(frames, sizes, strict=True):
                _write_all(file, memoryview(frame).cast("B"))
                file.seek(_padded(size) - size, os.SEEK_CUR)
            file.truncate(total)
    except BaseException:
        os.unlink(path)
        raise
    return Shipment(path=path, sizes=sizes)


def unload(shipment: Shipment) -> Any:
    """The value. Its arrays are writable and this process's own."""
    if shipment.path is None:
        return codec.loads([bytearray(frame) for frame in shipment.frames])
    with open(shipment.path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    view, frames, begin = memoryview(mapped), [], 0
    for size in shipment.sizes:
        frames.append(view[begin : begin + size])
        begin += _padded(size)
    return codec.loads(frames)


def discard(shipment: Shipment) -> None:
    """Remove the file's name, once everybody who needs it has mapped it."""
    if shipment.path is not None:
        Path(shipment.path).unlink(missing_ok=True)


def memory_folder(run_dir: Path) -> Path:
    """Where files lie in memory; the cluster's own folder where there is no such."""
    return MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else run_dir


def _write_all(file: io.FileIO, octets: memoryview) -> None:
    while octets:
        octets = octets[file.write(octets) :]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _folder(total: int, run_dir: Path) -> Path:
    """Where a file of so many bytes goes: memory, unless that would fill it."""
    if MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > 2 * total:
        return MEMORY_FOLDER
    return run_dir
