"""The order of calls on devices other than the CPU and CUDA, with fake devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nbdist.collectives.sync.device_work import for_any_thread, synchronize

XPU, MPS, XLA = map(torch.device, ("xpu", "mps", "xla"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was waited for, where xpu is torch's accelerator and mps has a module."""
    told: list[str] = []
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: XPU)
    monkeypatch.setattr(accelerator, "synchronize", lambda: told.append("accelerator"))
    modules = {"mps": SimpleNamespace(synchronize=lambda: told.append("module"))}

    def module_of(kind: str) -> SimpleNamespace:
        if kind not in modules:
            raise RuntimeError(f"no module for {kind}")
        return modules[kind]

    monkeypatch.setattr(torch, "get_device_module", module_of)
    return told


def test_the_device_s_own_synchronisation_is_used(log: list[str]) -> None:
    for device in (XPU, MPS, XLA):
        synchronize(device)
    assert log == ["accelerator", "module"]  # a copy from XLA waits itself


def test_another_thread_s_call_comes_after_the_queued_work(log: list[str]) -> None:
    def body() -> None:
        log.append("body")

    for_any_thread(body, "mps", check=lambda: None)()
    assert log == ["module", "body", "module"]


@pytest.mark.parametrize("kind", ["cpu", "none"])
def test_calls_on_host_memory_wait_for_no_device(log: list[str], kind: str) -> None:
    for_any_thread(lambda: log.append("body"), kind, check=lambda: None)()
    assert log == ["body"]
