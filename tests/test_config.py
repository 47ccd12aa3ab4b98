"""Settings come from options, variables, nbdist.toml and defaults, in this order."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbdist.config import (
    CONFIGS,
    ClusterConfig,
    CollectiveConfig,
    ForkConfig,
    OutputConfig,
    all_settings,
    rank_variables,
    read_file,
)
from nbdist.errors import UsageError

FILE = """
[cluster]
n = 2
device = "cpu"
timeout_s = 60
gpu_memory = 0.25
oversubscribe = true

[collectives]
slot_bytes = 65536
check = false

[output]
cap_mb = 3
widgets = false

[fork_server]
preload = ["json", "csv"]
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in all_settings({}, {}):
        monkeypatch.delenv(setting.variable, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_removed_working_folder_is_named(folder: Path) -> None:
    folder.rmdir()
    with pytest.raises(UsageError, match="working folder was removed: change to"):
        read_file()


def test_the_file_replaces_defaults(folder: Path) -> None:
    (folder / "nbdist.toml").write_text(FILE)
    file = read_file()
    cluster = ClusterConfig.read(file)
    assert (cluster.n, cluster.device, cluster.timeout_s) == (2, "cpu", 60.0)
    assert (cluster.gpu_memory, cluster.oversubscribe) == ("0.25", True)
    assert cluster.on_failure == "replace"
    collectives = CollectiveConfig.read(file)
    assert (collectives.slot_bytes, collectives.check) == (65536, False)
    assert OutputConfig.read(file) == OutputConfig(cap_mb=3.0, widgets=False)
    assert ForkConfig.read(file).preload == ("json", "csv")


def test_a_variable_comes_before_the_file_and_an_option_before_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "nbdist.toml").write_text(FILE)
    monkeypatch.setenv("NBDIST_N", "3")
    monkeypatch.setenv("NBDIST_DEVICE", "auto")
    monkeypatch.setenv("NBDIST_SLOT_BYTES", "")  # as if it was not set
    file = read_file()
    assert ClusterConfig.read(file).n == 3
    found = {
        f"{each.table}.{each.name}": (each.value, each.source)
        for each in all_settings(file, {"n": 4, "threads": None})
    }
    assert found["cluster.n"] == ("4", "%dist_start")
    assert found["cluster.device"] == ("auto", "NBDIST_DEVICE")
    assert found["cluster.threads"] == ("a share of the cores", "default")
    assert found["collectives.slot_bytes"] == ("65536", "nbdist.toml")
    assert found["fork_server.preload"] == ("json,csv", "nbdist.toml")


def test_the_ranks_get_what_only_the_file_sets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "nbdist.toml").write_text(FILE)
    monkeypatch.setenv("NBDIST_CHECK", "1")
    assert rank_variables(read_file()) == {
        "NBDIST_SLOT_BYTES": "65536",
        "NBDIST_OUTPUT_CAP_MB": "3.0",
        "NBDIST_WIDGETS": "0",
    }


def test_every_setting_can_be_read_from_its_own_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "nbdist.toml").write_text(FILE)
    file = read_file()
    for setting in all_settings(file, {}):
        if setting.source == "nbdist.toml":
            monkeypatch.setenv(setting.variable, setting.value)
    for kind in CONFIGS:
        assert kind.from_environment() == kind.read(file)


def test_without_a_file_there_are_defaults(folder: Path) -> None:
    assert read_file() == {}
    assert {each.source for each in all_settings({}, {})} == {"default"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n = 2", "'n' is not known: .*the tables are \\[cluster\\]"),
        ("[clutser]\nn = 2", "\\[clutser\\] is not known: did you mean 'cluster'"),
        ("[cluster]\nthread = 2", "unknown setting 'thread' .*did you mean 'threads'"),
        ("[cluster]\nresume = 'a'", "unknown setting 'resume'"),
        ("[cluster]\nn = 'two'", "n = 'two' in \\[cluster\\]: expected a whole number"),
        ("[cluster]\nn = true", "n = True in \\[cluster\\]: expected a whole number"),
        ("[cluster]\nn = 2.0", "expected a whole number"),
        ("[collectives]\ncheck = 0", "expected 1 or 0 \\(in the file, true or false"),
        ("[fork_server]\npreload = [1]", "preload = \\[1\\] .*a list of names"),
        ("[cluster", "is no valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path(
    folder: Path, text: str, says: str
) -> None:
    (folder / "nbdist.toml").write_text(text)
    with pytest.raises(UsageError, match=says) as refused:
        read_file()
    assert str(folder / "nbdist.toml") in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("NBDIST_START_TIMEOUT", "soon", "expected a number"),
        ("NBDIST_CHECK", "yes", "expected 1 or 0"),
        ("NBDIST_SLOT_BYTES", "64k", "expected a whole number"),
    ],
)
def test_a_wrong_variable_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, says: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=f"{variable}='{text}': {says}"):
        all_settings({}, {})


def test_the_fork_server_is_switched_off_by_the_file(folder: Path) -> None:
    (folder / "nbdist.toml").write_text("[fork_server]\npreload = false\n")
    assert ForkConfig.read(read_file()).preload is None
    (folder / "nbdist.toml").write_text("[fork_server]\npreload = true\n")
    with pytest.raises(UsageError, match="preload = True"):
        read_file()
