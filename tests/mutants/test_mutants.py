"""The deliberate faults are written for the code that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.cpu_mutants import KINDS
from tests.mutants.mutant import ROOT, Mutant
from tests.simgpu import mutants

MUTANTS = [mutant for kind in KINDS.values() for mutant in kind] + mutants.MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_applies_and_its_tests_exist(mutant: Mutant, tmp_path: Path) -> None:
    target = tmp_path / "nbdist" / mutant.file
    target.parent.mkdir(parents=True)
    target.write_bytes((ROOT / "nbdist" / mutant.file).read_bytes())
    with mutant.applied(tmp_path):
        compile(target.read_text(encoding="utf-8"), target.name, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in text or not name


def test_a_fault_for_other_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nbdist").mkdir()
    (tmp_path / "nbdist" / "a.py").write_text("x = 1\n")
    gone = Mutant("gone", "a.py", "y = 2", "", [])
    with (
        pytest.raises(ValueError, match="0 times instead of once"),
        gone.applied(tmp_path),
    ):
        pass


def test_the_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 80
