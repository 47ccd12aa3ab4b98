"""A deliberate fault in nbdist, which a test must catch."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("nbdist", "tests", "docs", "README.md", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests of which one must fail with it."""

    name: str
    """The fault in words."""
    file: str
    """The file, below `nbdist/`."""
    old: str
    """A text that occurs once in the file."""
    new: str
    """What replaces it."""
    tests: Sequence[str]
    """The tests, as pytest takes them."""
    cards: int = 1
    """Number of GPUs, for a fault in the CUDA code."""

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Have the fault in a copy of the repository.

        Raises:
            ValueError: The file has the text not once.
        """
        path = root / "nbdist" / self.file
        text = path.read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.name}: nbdist/{self.file} has the text {count} times instead "
                f"of once; write the fault for the new code:\n{self.old}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        yield
        path.write_text(text, encoding="utf-8")


Run = Callable[[Path, Sequence[str], int], tuple[int | None, str]]
"""Runs tests of a copy, with a number of GPUs. Returns pytest's exit code, None if it
hangs, and its output."""


@contextmanager
def copy_of_repository() -> Iterator[Path]:
    """A copy of what the tests need."""
    with tempfile.TemporaryDirectory(prefix="nbm") as made:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, Path(made, name), ignore=ignored)
            elif source.exists():
                shutil.copy(source, made)
        yield Path(made)


def is_caught(mutant: Mutant, root: Path, run: Run) -> tuple[bool, str]:
    """Whether a test fails with the fault, and the last line of its output."""
    with mutant.applied(root):
        code, output = run(root, mutant.tests, mutant.cards)
    if code is None:
        return True, "it hangs"
    if code not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest ended with {code}:\n{output}")
    last = output.strip().splitlines()[-1]
    if "skipped" in last and "passed" not in last and "failed" not in last:
        raise RuntimeError(f"{mutant.name}: its tests were skipped:\n{output}")
    return code == 1, last


def check_tests(mutants: Sequence[Mutant], root: Path, run: Run) -> None:
    """Check that the tests of these faults pass on a copy without a fault.

    Raises:
        RuntimeError: A test fails, so that it would seem to catch every fault.
    """
    for cards in sorted({mutant.cards for mutant in mutants}):
        tests = {t for m in mutants if m.cards == cards for t in m.tests}
        code, output = run(root, sorted(tests), cards)
        if code != 0:
            raise RuntimeError(f"without a fault, pytest ends with {code}:\n{output}")


def missed_among(mutants: Sequence[Mutant], runs: Sequence[Run]) -> list[Mutant]:
    """Try each fault, and print the results. Returns those that no run has caught."""
    missed = []
    with copy_of_repository() as root:
        check_tests(mutants, root, runs[0])
        for mutant in mutants:
            begun = time.monotonic()
            for number, run in enumerate(runs, start=1):  # noqa: B007 - printed below
                caught, why = is_caught(mutant, root, run)
                if caught:
                    break
            else:
                missed.append(mutant)
            word = "caught" if caught else "MISSED"
            taken_s = time.monotonic() - begun
            about = f"run {number}, {taken_s:.0f} s: {why}"
            print(f"{word}  {mutant.name} ({about})", flush=True)
    print(f"{len(mutants) - len(missed)} of {len(mutants)} caught")
    print(*(f"    missed: {mutant.name}" for mutant in missed), sep="\n", flush=True)
    return missed
