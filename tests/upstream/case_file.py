"""Loads a file of unittest cases, and runs one of them in this process."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

__all__ = ["FAILED", "PASSED", "SKIPPED", "Outcome", "cases_of", "load", "run"]

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """What became of one case."""

    kind: str
    """`PASSED`, `FAILED` or `SKIPPED`."""
    reason: str = ""
    """The traceback of a failure, or the reason of a skip."""


def load(path: Path) -> ModuleType:
    """Import a file, which may import its neighbours."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def cases_of(module: ModuleType) -> dict[str, type[unittest.TestCase]]:
    """The class of each case of the module, by "Class.method"."""
    loader = unittest.TestLoader()
    return {
        f"{each.__name__}.{method}": each
        for each in _classes(module)
        for method in loader.getTestCaseNames(each)
    }


def _classes(module: ModuleType) -> Iterator[type[unittest.TestCase]]:
    for each in vars(module).values():
        is_case = isinstance(each, type) and issubclass(each, unittest.TestCase)
        if is_case and each.__module__ == module.__name__:
            yield each


def run(case: unittest.TestCase) -> Outcome:
    """Run one case. Failures of its fixtures count too."""
    result = unittest.TestResult()
    case.run(result)
    found = [*result.failures, *result.errors]
    if found:
        return Outcome(FAILED, found[0][1])
    if result.unexpectedSuccesses:
        return Outcome(FAILED, "unexpected success")
    if result.skipped or not result.testsRun:
        return Outcome(SKIPPED, result.skipped[0][1] if result.skipped else "not run")
    return Outcome(PASSED)
