"""Variables that a rank gets from another one: their time, and the rank's own names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.engine import calls
from nbdist.engine.calls import (
    TOTAL_LIMIT_S,
    VARIABLE_LIMIT_S,
    _CannotTravel,
    _keeping_own_names,
    _TimeLimits,
)


def test_a_variable_has_a_limit_and_all_together_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, limits = 0.0, []

    class Step:
        def __init__(self, _what: str, limit_s: float) -> None:
            limits.append(limit_s)

        def __enter__(self) -> None:
            nonlocal now
            now += 4.0

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(calls, "transfer_step", Step)
    variables = _TimeLimits("unpickle")
    for number in range(5):
        with variables.step(f"x{number}"):
            pass
    assert limits == [VARIABLE_LIMIT_S] * 4 + [TOTAL_LIMIT_S - 16.0]
    with pytest.raises(_CannotTravel, match="together took 20 s"), variables.step("y"):
        pass
    assert variables.name == "y"


def test_the_names_of_every_cell_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"rank": 1, "world_size": 2, "local_rank": 1, "device": "cuda:1"}
    namespace: dict[str, Any] = {**own, "x": 1}
    shell = SimpleNamespace(user_global_ns=namespace)
    monkeypatch.setattr(calls, "this_rank", lambda: SimpleNamespace(shell=shell))
    with _keeping_own_names():
        namespace |= dict.fromkeys([*own, "x"], "another's")
    assert namespace == {**own, "x": "another's"}
