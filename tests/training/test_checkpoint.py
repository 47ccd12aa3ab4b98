"""A file of saved state that is incomplete or damaged is refused by its path."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nbdist.errors import CheckpointError
from nbdist.training.elastic import checkpoint
from nbdist.training.elastic.state import State

HEADER: dict[str, Any] = {"commit": 1, "size": 2, "names": ["step"], "time": 1e9}
one_file = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def sealed(text: bytes, payload: bytes = b"", length: int | None = None) -> bytes:
    """A file with a valid checksum and any header."""
    digest = checkpoint._digest(text)
    digest.update(payload)
    length = len(text) if length is None else length
    prefix = struct.pack("<8sII32s", b"NBDSTATE", 1, length, digest.digest())
    return prefix + text + payload


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_a_path_that_is_not_a_regular_file_is_refused_at_once(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "state"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"state cannot be read.*regular file"):
        checkpoint.check(path)


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(sealed(json.dumps(HEADER).encode()))
    (tmp_path / "state").symlink_to("real")
    assert checkpoint.check(tmp_path / "state").header == HEADER


@one_file
@given(st.binary(max_size=200), st.binary(max_size=20))
@example(b"", b"")
@example(b"[" * 100_000, b"")
@example(b"\xff\xfe", b"")
@example(b"1" * 5000, b"")
def test_a_header_that_is_not_json_is_refused(
    tmp_path: Path, text: bytes, payload: bytes
) -> None:
    path = tmp_path / "state"
    path.write_bytes(sealed(text, payload))
    with pytest.raises(CheckpointError, match=r"state has a bad header: ."):
        checkpoint.check(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@one_file
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(HEADER, JSON)))
@example({**HEADER, "commit": True})
@example({**HEADER, "commit": -1})
@example({**HEADER, "size": 0})
@example({**HEADER, "names": "step"})
@example({**HEADER, "names": [1]})
@example({**HEADER, "time": float("nan")})
@example({**HEADER, "time": 1e300})
@example({name: HEADER[name] for name in ("commit", "size", "names")})
def test_an_invalid_field_of_a_header_is_named(
    tmp_path: Path, header: dict[str, Any]
) -> None:
    path = tmp_path / "state"
    path.write_bytes(sealed(json.dumps(header).encode()))
    with pytest.raises(CheckpointError, match=r"state has a bad header: '(\w+)' is"):
        checkpoint.check(path)


@one_file
@given(st.integers(0, 2**32 - 1), st.integers(0, 300))
@example(2**32 - 1, 300)
def test_a_wrong_length_and_a_truncated_file_are_refused(
    tmp_path: Path, length: int, size: int
) -> None:
    text = json.dumps(HEADER).encode()
    whole = sealed(text, b"payload", length)
    if length == len(text) and size >= len(whole):
        return
    path = tmp_path / "state"
    path.write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match=r"state is "):
        checkpoint.check(path)


def test_a_header_that_names_missing_data_is_refused(
    tmp_path: Path,
) -> None:
    State(step=1).save(tmp_path / "state")
    opened = checkpoint.check(tmp_path / "state")
    with checkpoint.read(opened) as file:
        payload = file.read()
    text = json.dumps({**opened.header, "names": ["other"]}).encode()
    (tmp_path / "state").write_bytes(sealed(text, payload))
    state = State(other=torch.ones(1))
    with pytest.raises(CheckpointError, match="does not hold what its header names"):
        state.load(tmp_path / "state")
