"""The sampler and its probes, on machines with and without a GPU."""

from __future__ import annotations

import os
import queue
import sys
from types import SimpleNamespace

import psutil
import pytest

from nbdist.telemetry.probes import CpuProbe, GpuProbe
from nbdist.telemetry.recorder import Recorder
from nbdist.telemetry.sampler import Sampler
from nbdist.telemetry.time_split import TimeSplitter
from nbdist.wire import Batch, DeviceSample


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """NVML with one GPU, whose answers a test sets. An exception is raised."""

    def __init__(self, **answers: object) -> None:
        super().__init__(NVMLError=NVMLError, answers=answers, calls=[])

    def __getattr__(self, name: str) -> object:
        def answer(*arguments: object) -> object:
            self.calls.append((name, *arguments))
            found = self.answers.get(name)
            if isinstance(found, Exception):
                raise found
            return found

        return answer


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(
        nvmlDeviceGetHandleByUUID="handle",
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=60, total=80),
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=97),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_a_cpu_rank_reports_its_own_process() -> None:
    probe = CpuProbe("cpu")
    sum(range(2_000_000))
    sample = probe.sample(2)
    assert (sample.rank, sample.device) == (2, "cpu")
    assert sample.utilisation == sample.cpu > 0
    resident = psutil.Process(os.getpid()).memory_info().rss
    assert sample.memory_own == sample.memory_used == pytest.approx(resident, rel=0.2)
    assert sample.memory_total is not None
    assert sample.memory_used < sample.memory_total


def test_a_gpu_is_found_by_its_uuid(nvml: FakeNvml) -> None:
    probe = GpuProbe("cuda:0", "GPU-1234")
    sample = probe.sample(1)
    probe.close()
    assert ("nvmlDeviceGetHandleByUUID", "GPU-1234") in nvml.calls
    assert (sample.rank, sample.device, sample.utilisation) == (1, "cuda:0", 97.0)
    assert (sample.memory_used, sample.memory_total) == (60, 80)
    assert nvml.calls[-1] == ("nvmlShutdown",)


def test_a_mig_device_has_memory_but_no_utilisation(nvml: FakeNvml) -> None:
    nvml.answers["nvmlDeviceGetUtilizationRates"] = NVMLError("Not Supported")
    sample = GpuProbe("cuda:0", "MIG-1").sample(0)
    assert sample.utilisation is None
    assert sample.memory_used == 60


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_nvml_or_the_gpu_all_values_are_none(
    nvml: FakeNvml, broken: str
) -> None:
    nvml.answers[broken] = NVMLError("Driver Not Loaded")
    probe = GpuProbe("cuda:0", "GPU-1234")
    sample = probe.sample(0)
    probe.close()
    assert (sample.utilisation, sample.memory_used, sample.memory_total) == (None,) * 3
    assert sample.cpu >= 0


def test_without_pynvml_all_values_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuProbe("cuda:0", "GPU-1234").sample(0).memory_used is None


def test_the_sampler_records_samples_until_it_is_closed() -> None:
    batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    recorder = Recorder(5, batches.put, interval_s=0.01)
    idle = TimeSplitter(lambda: None, lambda _file, _line: "", {}, lambda: False, "/")
    sampler = Sampler(recorder, "cpu", None, idle, interval_s=0.02)
    first, second = batches.get(timeout=5), batches.get(timeout=5)
    assert sampler.close(5)
    assert sampler.close(5)
    assert recorder.close(5)
    for sample in first.records + second.records:
        assert isinstance(sample, DeviceSample)
        assert sample.rank == 5


@pytest.mark.gpu
def test_a_real_gpu_reports_its_memory() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    held = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    sample = GpuProbe("cuda:0", uuid).sample(0)
    assert sample.memory_used is not None
    assert sample.memory_total is not None
    assert held.nbytes < sample.memory_used < sample.memory_total
    assert sample.memory_own is not None
    assert sample.memory_own >= held.nbytes
