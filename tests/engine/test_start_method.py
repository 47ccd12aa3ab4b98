"""Which start method of `multiprocessing` a rank uses."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

import pytest

from nbdist.engine import start_method


@pytest.fixture
def _fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's default is that of Python 3.14, and nobody has chosen."""
    chooser = start_method._chooser
    server: BaseContext = multiprocessing.get_context("forkserver")
    for name, value in (("_default_context", server), ("_actual_context", None)):
        monkeypatch.setattr(chooser, name, value)
    monkeypatch.setattr(start_method, "_PYTHONS", server)


@pytest.mark.usefixtures("_fork_server")
def test_fork_is_the_default_and_nobodys_choice() -> None:
    start_method.prefer_fork()
    assert multiprocessing.get_start_method(allow_none=True) is None
    assert multiprocessing.get_context().get_start_method() == "fork"


@pytest.mark.usefixtures("_fork_server")
def test_another_method_can_be_chosen_after_it() -> None:
    start_method.prefer_fork()
    multiprocessing.set_start_method("spawn")
    assert multiprocessing.get_start_method() == "spawn"


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("chosen", [None, "spawn"])
def test_a_script_begins_with_pythons_default(chosen: str | None) -> None:
    start_method.prefer_fork()
    multiprocessing.set_start_method(chosen, force=True)
    with start_method.pythons_own():
        assert multiprocessing.get_start_method() == "forkserver"
        multiprocessing.set_start_method("fork", force=True)
    assert multiprocessing.get_start_method(allow_none=True) == chosen
    assert multiprocessing.get_start_method() == (chosen or "fork")
