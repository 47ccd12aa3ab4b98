"""The notebook that trains with three strategies side by side."""

from __future__ import annotations

import re
from collections.abc import Callable

STRATEGIES = ("Mirrored", "CentralStorage", "LocalSGD")
PARAMETERS = 64 * 128 + 128 + 128 * 10 + 10


def test_it_compares_three_strategies(run_example: Callable[[str], str]) -> None:
    printed = run_example("strategies")
    for name in STRATEGIES:
        accuracy = _number(rf"{name}: test accuracy: ([\d.]+)%", printed)
        assert accuracy > 92, name
        assert _number(rf"{name}: test accuracy: [\d.]+%, ([\d.]+) s", printed) > 0
    differs = r"{}: weights differ from Mirrored's by at most ([\d.e+-]+)"
    assert _number(differs.format("CentralStorage"), printed) < 1e-4
    assert _number(differs.format("LocalSGD"), printed) > 1e-3
    momenta = re.findall(r"\[([\d,-]+)\] (\w+): (\d+) momenta here", printed)
    assert {
        name: {int(count) for _, each, count in momenta if each == name}
        for name in STRATEGIES
    } == {
        "Mirrored": {PARAMETERS},
        "CentralStorage": {0, PARAMETERS},
        "LocalSGD": {PARAMETERS},
    }
    assert ("0", "CentralStorage", str(PARAMETERS)) in momenta
    assert _number(r"ranks' weights are up to ([\d.]+) apart", printed) > 0.01
    assert _number(r"averaged, they are ([\d.]+) apart", printed) == 0


def _number(pattern: str, printed: str) -> float:
    found = re.search(pattern, printed)
    assert found is not None, printed
    return float(found[1])
