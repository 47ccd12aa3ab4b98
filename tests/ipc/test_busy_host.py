"""Time limits grow with the load of the host."""

from __future__ import annotations

import os

import pytest

from nbdist.ipc.busy_host import MOST, stretched


@pytest.mark.parametrize(
    ("per_core", "times"), [(0.0, 1.0), (0.9, 1.0), (3.0, 3.0), (1000.0, MOST)]
)
def test_a_limit_grows_with_the_processes_per_core(
    monkeypatch: pytest.MonkeyPatch, per_core: float, times: float
) -> None:
    cores = os.cpu_count() or 1
    monkeypatch.setattr(os, "getloadavg", lambda: (per_core * cores, 0.0, 0.0))
    assert stretched(5.0) == pytest.approx(5.0 * times)


def test_a_limit_stays_where_the_load_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError("load averages are unobtainable")

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert stretched(5.0) == 5.0
