"""What the doctor says of things that are missing or too small."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from typing import Any

import pytest

from nbdist.commands import doctor
from nbdist.commands.doctor import Finding
from nbdist.errors import StartError
from tests.processes import HANG_S


def found(check: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in check()}


def test_a_missing_and_an_old_package_are_problems_with_their_cure(
    monkeypatch: pytest.MonkeyPatch,
):
    old = {"psutil": "5.9", "cloudpickle": None}
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: old.get(name, real(name)))
    findings = found(doctor._requirements)
    assert set(findings) == set(old)
    assert findings["psutil"] == Finding(
        "psutil", "5.9; nbdist needs >=6.0", "problem", 'pip install "psutil>=6.0"'
    )
    assert findings["cloudpickle"].text.startswith("not installed")


def test_a_full_disk_and_a_small_dev_shm(monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    free = {"/dev/shm": 0}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(1 << 30, 0, free.get(path, 10 << 20))
    )
    findings = found(doctor._memory)
    assert findings["shared memory"].status == "problem"
    assert "--shm-size" in findings["shared memory"].cure
    assert findings["temporary files"].status == "note"
    assert "TMPDIR" in findings["temporary files"].cure


def test_few_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    (finding,) = doctor._limits()
    assert finding.status == "note"
    assert "ulimit -n 1024" in finding.cure


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12"),
        ("import os; os._exit(3)", "it ended"),
    ],
)
def test_a_torch_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str
):
    monkeypatch.setattr(doctor, "ASK_TORCH", program)
    finding = found(doctor._torch)["torch"]
    assert finding.status == "problem"
    assert said in finding.text


def test_a_cpu_build_beside_gpus(monkeypatch: pytest.MonkeyPatch):
    host = doctor.this_host()
    two = namedtuple("host", "gpus")((object(), object()))
    assert not host.gpus, "this test is for a host without GPUs"
    monkeypatch.setattr(doctor, "this_host", lambda: two)
    told = '{"version": "2.13.0", "cuda": null, "hip": null, "devices": 0, "apart": []}'
    monkeypatch.setattr(doctor, "ASK_TORCH", f"print({told!r})")
    finding = found(doctor._torch)["GPUs for torch"]
    assert finding.text == "0 of 2"
    assert "a build of torch" in finding.cure


def test_ranks_that_do_not_start(monkeypatch: pytest.MonkeyPatch):
    def fail(**_: object) -> None:
        raise StartError("0 of 2 ranks were up")

    for check in ("_torch", "_front_ends"):
        monkeypatch.setattr(doctor, check, lambda: iter(()))
    monkeypatch.setattr(doctor, "Cluster", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    *_, finding = doctor.findings(starts_ranks=True)
    assert finding == Finding("start", "0 of 2 ranks were up", "problem")


def test_the_exit_code_says_whether_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bad = Finding("disk", "full", "problem", "make room")
    for listed, code in (([Finding("a", "b")], 0), ([Finding("a", "b"), bad], 1)):
        monkeypatch.setattr(doctor, "findings", lambda listed=listed, **_: iter(listed))
        assert doctor.show(as_json=False, starts_ranks=False) == code
    printed = capsys.readouterr().out
    assert "✗ disk" in printed
    assert "→ make room" in printed


def test_a_command_that_is_not_known_is_an_error_with_those_that_are():
    argv = [sys.executable, "-m", "nbdist", "train"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    for command in ("doctor", "demo", "examples"):
        assert command in done.stderr
