"""The faults of mutants.py are written for the code that there is."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_applies_and_its_tests_exist(
    mutant: mutants.Mutant, tmp_path: Path
) -> None:
    target = tmp_path / "nbdist" / mutant.file
    target.parent.mkdir(parents=True)
    target.write_bytes((mutants.ROOT / "nbdist" / mutant.file).read_bytes())
    mutant.apply(tmp_path)
    compile(target.read_text(encoding="utf-8"), target.name, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (mutants.ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}" in text or not name


def test_a_fault_for_other_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nbdist").mkdir()
    (tmp_path / "nbdist" / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="0 times instead of once"):
        mutants.Mutant("gone", "a.py", "y = 2", "", []).apply(tmp_path)


def test_the_names_differ() -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 20
