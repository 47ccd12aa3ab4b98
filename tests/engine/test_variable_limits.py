"""How long a look at all variables may take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nbdist.engine import inspection
from nbdist.engine.inspection import variables


@pytest.mark.parametrize(
    ("is_busy", "count", "limit_s"),
    [
        (False, 1, 2.0),
        (False, 2, 2.0),
        (False, 16, 0.5),
        (True, 1, 1.0),
        (True, 6, 0.25),
    ],
)
def test_a_variable_has_a_limit_and_a_share_of_that_of_all(
    is_busy: bool, count: int, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, limits = 0.0, []

    def described(name: str, _value: object, seconds: float) -> tuple[str, bool]:
        nonlocal now
        now += seconds
        limits.append(seconds)
        return name, True

    names = [f"x{number:02}" for number in range(count)]
    rank = SimpleNamespace(activity="In[1]" if is_busy else "")
    monkeypatch.setattr(inspection, "this_rank", lambda: rank)
    monkeypatch.setattr(inspection, "user_variables", lambda: dict.fromkeys(names))
    monkeypatch.setattr(inspection, "_is_large", lambda _: True)
    monkeypatch.setattr(inspection, "_described", described)
    monkeypatch.setattr(inspection, "time", SimpleNamespace(monotonic=lambda: now))
    assert list(map(str, variables())) == names
    assert limits == pytest.approx([limit_s] * count)
