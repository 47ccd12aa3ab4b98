"""A commit: the values that all ranks keep, and the file that holds them."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbdist.errors import CheckpointError
from nbdist.training import checkpoint

__all__ = ["Commit", "read_values", "write_commit"]


@dataclass(frozen=True)
class Commit:
    """The values of one commit."""

    number: int
    """Counts from 1; 0 where the values are of no commit yet."""
    size: int
    """Of the world that made it."""
    values: dict[str, Any]


def write_commit(path: Path, commit: Commit) -> None:
    """Write a commit to a file of saved state."""
    payload = io.BytesIO()
    torch.save(commit.values, payload)
    header = {
        "commit": commit.number,
        "size": commit.size,
        "names": list(commit.values),
        "time": time.time(),
    }
    checkpoint.write(path, header, payload.getbuffer())


def read_values(opened: checkpoint.Opened, *, trusted: bool) -> dict[str, Any]:
    """The values in a file that was found whole.

    Args:
        trusted: also load objects other than tensors and plain values.

    Raises:
        CheckpointError: they cannot be loaded.
    """
    on_gpu = torch.cuda.is_available()
    with checkpoint.read(opened) as file:
        payload = io.BytesIO(file.read())
    try:
        values: dict[str, Any] = torch.load(
            payload, map_location=None if on_gpu else "cpu", weights_only=not trusted
        )
    except Exception as error:  # whatever unpickling raises; the digest was right
        hint = (
            "" if trusted else "; if you trust the file, state.load(path, trusted=True)"
        )
        raise CheckpointError(
            f"{opened.path} cannot be loaded: {error}{hint}"
        ) from error
    if not isinstance(values, dict) or values.keys() != set(opened.header["names"]):
        raise CheckpointError(f"{opened.path} does not hold what its header names")
    return values
