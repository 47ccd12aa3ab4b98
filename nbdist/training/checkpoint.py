"""A file of saved state: whole or refused, and never the only one.

    offset  bytes
    0       8      b"NBDSTATE"
    8       4      version, little-endian
    12      4      length of the header, little-endian
    16      32     BLAKE2b digest of the header's length, header and payload
    48             header: JSON
                   payload, to the end of the file

A new file is written beside the old one, flushed to the disk and renamed, and the old
one stays as PATH.previous. This file imports no torch, so that the notebook can check a
file before it starts anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nbdist.errors import CheckpointError

__all__ = ["Opened", "check", "previous", "read", "write"]

MAGIC = b"NBDSTATE"
VERSION = 1
_PREFIX = struct.Struct("<8sII32s")
_CHUNK_BYTES = 1 << 20


class Opened(NamedTuple):
    """A file that was found whole."""

    path: Path
    """The one asked for, or the previous one."""
    header: dict[str, Any]
    payload: int
    """Where the payload begins, in bytes."""
    refused: str
    """Why the one asked for was not used; "" where it was."""


def previous(path: Path) -> Path:
    """Where the file stays that a new one has replaced."""
    return path.with_name(path.name + ".previous")


def write(
    path: Path,
    header: dict[str, Any],
    payload: memoryview | bytes,
    *,
    private: bool = False,
) -> None:
    """Put a file in place of the one that is there, or leave that one as it is.

    Args:
        header: what JSON can hold.
        payload: any bytes.
        private: let only this user read it, and keep no PATH.previous.

    Raises:
        OSError: it could not be written; what was there before is untouched.
    """
    text = json.dumps(header).encode()
    digest = _digest(text)
    digest.update(payload)
    prefix = _PREFIX.pack(MAGIC, VERSION, len(text), digest.digest())
    # Only here, for it imports torch.
    from nbdist.training.files import write_atomically

    def fill(file: BinaryIO) -> None:
        for part in (prefix, text, payload):
            file.write(part)
        file.flush()
        if not private:
            _keep_previous(path)

    write_atomically(path, fill, mode=0o600 if private else None)


def _keep_previous(path: Path) -> None:
    """Give the file that is to be replaced its second name; it keeps its first."""
    link = path.with_name(f".{path.name}.{secrets.token_hex(8)}.link")
    with contextlib.suppress(FileNotFoundError):
        try:
            os.link(path, link)
        except OSError:  # a file system without hard links: a copy in two steps
            os.replace(path, previous(path))
        else:
            os.replace(link, previous(path))


def check(path: Path) -> Opened:
    """Find a whole file: this one, or else the previous one.

    Raises:
        CheckpointError: neither is; the message says what is wrong with each.
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
    """The file, open at its payload. The caller closes it."""
    file = open(opened.path, "rb")  # noqa: SIM115 - the caller's to close
    file.seek(opened.payload)
    return file


def _open(path: Path) -> Opened:
    try:
        with open(path, "rb") as file:
            header, payload = _verify(path, file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    return Opened(path, header, payload, "")


def _verify(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise CheckpointError(f"{path} is not a file that state.save() has written")
    _magic, version, length, expected = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise CheckpointError(
            f"{path} has version {version}, and this nbdist reads version {VERSION}"
        )
    text = file.read(length)
    digest = _digest(text)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    if digest.digest() != expected:
        raise CheckpointError(f"{path} is damaged: its checksum does not agree")
    return json.loads(text), _PREFIX.size + length


def _digest(header: bytes) -> hashlib.blake2b:
    digest = hashlib.blake2b(struct.pack("<I", len(header)), digest_size=32)
    digest.update(header)
    return digest
