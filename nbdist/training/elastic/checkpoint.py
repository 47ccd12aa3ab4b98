"""The format of a file of saved state.

    offset  bytes
    0       8      b"NBDSTATE"
    8       4      version, little-endian
    12      4      length of the header, little-endian
    16      32     BLAKE2b digest of the header's length, header and payload
    48             header: JSON
                   payload, to the end of the file

A new file is written beside the old one, flushed to the disk and renamed. The old file
is kept as PATH.previous. A reader refuses a file whose digest is wrong. This
module imports no torch, so that the notebook can check a file before it starts ranks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nbdist.errors import CheckpointError
from nbdist.ipc.atomic_files import write_atomically

__all__ = [
    "Opened",
    "Payload",
    "check",
    "packed",
    "payload_of",
    "previous",
    "read",
    "write",
]

MAGIC = b"NBDSTATE"
VERSION = 1
_PREFIX = struct.Struct("<8sII32s")
_CHUNK_BYTES = 1 << 20
LATEST_TIME_S = 1e11  # in the year 5138; beyond it, `time.localtime` overflows


class Opened(NamedTuple):
    """A file that was checked and is complete."""

    path: Path
    """The requested file, or the previous one."""
    header: dict[str, Any]
    payload: int
    """Offset of the payload, in bytes."""
    refused: str
    """Why the requested file was not used; "" if it was."""


def previous(path: Path) -> Path:
    """The path at which a file is kept when a new one replaces it."""
    return path.with_name(path.name + ".previous")


def write(path: Path, header: dict[str, Any], payload: memoryview | bytes) -> None:
    """Replace a file of saved state, and keep the old one as the previous one.

    Args:
        path: the file.
        header: a dict that can be written as JSON.
        payload: any bytes.

    Raises:
        OSError: the file could not be written. The old file is unchanged.
    """

    def fill(file: BinaryIO) -> None:
        with payload_of(file, header) as out:
            out.write(payload)
        file.flush()
        _keep_previous(path)

    write_atomically(path, fill)


def packed(header: dict[str, Any], payload: bytes) -> bytes:
    """The content of a file of saved state, for a small payload."""
    file = io.BytesIO()
    with payload_of(file, header) as out:
        out.write(payload)
    return file.getvalue()


class Payload(io.RawIOBase):
    """A stream that writes the payload of a file, and computes its digest."""

    def __init__(self, file: BinaryIO, digest: hashlib.blake2b) -> None:
        self._file = file
        self._digest = digest

    def write(self, data: Any) -> int:
        """Append bytes to the payload; return their number."""
        self._digest.update(data)
        self._file.write(data)
        return memoryview(data).nbytes


@contextlib.contextmanager
def payload_of(file: BinaryIO, header: dict[str, Any]) -> Iterator[Payload]:
    """Yield the stream to which the payload of a file of saved state is written.

    Args:
        file: empty and seekable. It is complete when the context ends.
        header: a dict that can be written as JSON.
    """
    text = json.dumps(header).encode()
    digest = _digest(text)
    file.write(bytes(_PREFIX.size) + text)
    yield Payload(file, digest)
    file.seek(0)
    file.write(_PREFIX.pack(MAGIC, VERSION, len(text), digest.digest()))
    file.seek(0, os.SEEK_END)


def _keep_previous(path: Path) -> None:
    """Link the current file to its previous name. It also keeps its own name."""
    link = path.with_name(f".{path.name}.{secrets.token_hex(8)}.link")
    with contextlib.suppress(FileNotFoundError):
        try:
            os.link(path, link)
        except OSError:  # a file system without hard links: copy, then rename
            os.replace(path, previous(path))
        else:
            os.replace(link, previous(path))


def check(path: Path) -> Opened:
    """Find a complete file: this one, or else the previous one.

    Raises:
        CheckpointError: neither is complete. The message has the reason for each.
    """
    try:
        return _open(path)
    except CheckpointError as error:
        refused = str(error)
    try:
        return _open(previous(path))._replace(refused=refused)
    except CheckpointError as error:
        raise CheckpointError(f"{refused}; {error}") from error


def read(opened: Opened) -> BinaryIO:
    """Open a file at its payload. The caller closes it.

    Raises:
        OSError: the file has been removed, or it is no longer a regular file.
    """
    file = _open_regular(opened.path)
    file.seek(opened.payload)
    return file


def _open(path: Path) -> Opened:
    try:
        with _open_regular(path) as file:
            header, payload = _verify(path, file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    return Opened(path, header, payload, "")


def _open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Opening a FIFO or a device without O_NONBLOCK may wait forever.

    Raises:
        OSError: the file cannot be opened, or it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _verify(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise CheckpointError(f"{path} is not a file that state.save() has written")
    _magic, version, length, expected = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise CheckpointError(
            f"{path} has version {version}, and this nbdist reads version {VERSION}"
        )
    size = os.fstat(file.fileno()).st_size
    if _PREFIX.size + length > size:
        raise CheckpointError(
            f"{path} is damaged: its header needs {length} bytes, the file has {size}"
        )
    text = file.read(length)
    digest = _digest(text)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    if digest.digest() != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is wrong")
    return _header(path, text), _PREFIX.size + length


def _header(path: Path, text: bytes) -> dict[str, Any]:
    """Parse the header.

    Raises:
        CheckpointError: the header lacks a field, or a field has a wrong value.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a bad header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a bad header: it is not a JSON object")
    for name, (is_good, expected) in _FIELDS.items():
        value = header.get(name)
        if not is_good(value):
            raise CheckpointError(
                f"{path} has a bad header: {name!r} is {value!r:.80}, expected "
                f"{expected}"
            )
    return header


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < LATEST_TIME_S


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "commit": (lambda value: _is_count(value, 0), "a number from 0"),
    "size": (lambda value: _is_count(value, 1), "a number from 1"),
    "names": (_are_names, "a list of names"),
    "time": (_is_time, "seconds since 1970"),
}
"""The fields that `State` writes into a header."""


def _digest(header: bytes) -> hashlib.blake2b:
    digest = hashlib.blake2b(struct.pack("<I", len(header)), digest_size=32)
    digest.update(header)
    return digest
