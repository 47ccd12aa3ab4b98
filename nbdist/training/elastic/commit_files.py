"""The files in which rank 0's last commit survives the death of all ranks.

    FOLDER/record    describes the commit, in the format of `checkpoint`. Its payload is
                     the pickle that `torch.save` writes as `data.pkl`
    FOLDER/DATA      the bytes of the commit's tensors; the record's header has the name

In the header, `parts` lists the offset and the size of each storage in the data file,
in bytes. The pickle refers to a storage by its index in that list. A record is renamed
into place, so a reader always finds a complete one. `shared_copies` writes the files,
on rank 0. This file imports no torch, so that the notebook can turn the two files into
an ordinary file of saved state.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.errors import CheckpointError
from nbdist.ipc.atomic_files import write_atomically
from nbdist.training.elastic import checkpoint

__all__ = [
    "RECORD",
    "STATE",
    "Commit",
    "Record",
    "is_record",
    "read_record",
    "write_record",
]

RECORD = "record"
STATE = "state"
"""The same commit as one file of saved state, which can be sent to another host."""
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Commit:
    """The values of one commit, in memory."""

    number: int
    """The number of the commit, from 1; 0 if the values are not a commit."""
    size: int
    """The size of the world that made the commit."""
    values: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """Describes a commit whose tensors lie in a data file."""

    commit: int
    """The number of the commit, from 1."""
    size: int
    """The size of the world that made the commit."""
    names: tuple[str, ...]
    """The names of the values."""
    time: float
    """When the commit was made, in seconds since 1970."""
    data: str
    """The name of the data file, in the same folder."""
    parts: tuple[tuple[int, int], ...]
    """Offset and size of each storage in the data file, in bytes."""
    pickled: bytes
    """The pickled values, which refer to the storages."""

    def packed(self) -> bytes:
        """The content of the record's file."""
        header = {**self._header(), "data": self.data, "parts": self.parts}
        return checkpoint.packed(header, self.pickled)

    def write_state(self, file: BinaryIO, data: int) -> None:
        """Write the commit as a file of saved state, as `state.save` does.

        Args:
            file: empty and seekable.
            data: a descriptor of the data file.

        Raises:
            OSError: the file could not be written, or the data file is too short.
        """
        with (
            checkpoint.payload_of(file, self._header()) as payload,
            zipfile.ZipFile(payload, "w") as archive,
        ):
            for name, content in self._entries(data):
                entry = zipfile.ZipInfo(f"commit/{name}")
                with archive.open(entry, "w", force_zip64=True) as out:
                    for chunk in content:
                        out.write(chunk)

    def _entries(self, data: int) -> Iterator[tuple[str, Iterator[bytes]]]:
        """The names and contents of the archive that `torch.load` reads."""
        yield "data.pkl", iter([self.pickled])
        yield "byteorder", iter([sys.byteorder.encode()])
        for key, (offset, size) in enumerate(self.parts):
            yield f"data/{key}", _chunks(data, offset, size)
        yield "version", iter([b"3\n"])

    def _header(self) -> dict[str, Any]:
        return {
            "commit": self.commit,
            "size": self.size,
            "names": list(self.names),
            "time": self.time,
        }


def is_record(header: dict[str, Any]) -> bool:
    """Whether a header belongs to a record, rather than to a file of saved state."""
    return "data" in header


def write_record(folder: Path, record: Record) -> None:
    """Replace the record in a folder. A reader sees the old record or the new one.

    The record is not flushed to the disk. It survives the end of this process, but not
    a crash of the machine.

    Raises:
        OSError: the record could not be written. The old one is unchanged.
    """
    write_atomically(
        folder / RECORD,
        lambda file: file.write(record.packed()),
        mode=0o600,
        durable=False,
    )


def read_record(opened: checkpoint.Opened) -> Record:
    """Read the record in a file that `checkpoint.check` has opened.

    Raises:
        CheckpointError: the header is not that of a record.
    """
    header = opened.header
    data: Any = header.get("data")
    parts: Any = header.get("parts")
    if not _is_name(data) or not _are_parts(parts):
        raise CheckpointError(
            f"{opened.path} has a bad header: it lacks the data file or the parts"
        )
    with checkpoint.read(opened) as file:
        pickled = file.read()
    return Record(
        header["commit"],
        header["size"],
        tuple(header["names"]),
        header["time"],
        data,
        tuple((offset, size) for offset, size in parts),
        pickled,
    )


def _is_name(value: object) -> bool:
    """Whether a value is the name of a file in the same folder."""
    return isinstance(value, str) and value == Path(value).name != ""


def _are_parts(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(part, Sequence)
        and len(part) == 2
        and all(isinstance(number, int) and number >= 0 for number in part)
        for part in value
    )


def _chunks(descriptor: int, offset: int, size: int) -> Iterator[bytes]:
    end = offset + size
    while offset < end:
        chunk = os.pread(descriptor, min(_CHUNK_BYTES, end - offset), offset)
        if not chunk:
            raise OSError("the data file of a commit is too short")
        yield chunk
        offset += len(chunk)
