"""Another Unix user can neither read a cluster's files nor make it load others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import Cluster
from nbdist.errors import ClusterError
from nbdist.wire import Resume
from tests.security.other_user import OWNER, STRANGER, home_of, start, why_not


@pytest.fixture
def homes() -> Iterator[tuple[Path, Path]]:
    if why := why_not():
        pytest.skip(why)
    with home_of(OWNER) as owner, home_of(STRANGER) as stranger:
        yield owner, stranger


def test_another_user_who_takes_every_name_reads_and_leaves_nothing(
    homes: tuple[Path, Path],
) -> None:
    home, strange = homes
    marker = home / "stranger-was-here"
    with start(
        STRANGER,
        strange,
        ["-m", "tests.security.file_stranger", str(marker), str(OWNER)],
    ) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        try:
            assert stranger.stdout.readline() == "looks\n"
            with start(OWNER, home, ["-m", "tests.security.file_owner"]) as owner:
                output, _ = owner.communicate(timeout=150)
            assert owner.returncode == 0
        finally:
            stranger.stdin.close()
        taken = json.loads(stranger.stdout.readline())
    assert not marker.exists()
    assert taken["got"] == []
    assert taken["tried"] > 150  # the other user's program ran and found names
    report = json.loads(output.splitlines()[-1])
    assert report == {
        "steps": [40, 40],
        "resumed": [40, 40],
        "pulled": [3_000_000] * 2,
        "open": [],
        "left": [],
    }


def test_a_commit_that_others_may_have_written_is_an_error_on_the_ranks(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    path.write_bytes(b"whatever")
    path.chmod(0o666)
    said = rf"loaded from {path}: rank 0 refused: PermissionError: .*may have written"
    with pytest.raises(ClusterError, match=said):
        cluster._begin_from(Resume(str(path), trusted=True))
    cluster.execute("state = nbdist.elastic.State(step=1)")
    assert cluster["state.step"] == [1] * 4
