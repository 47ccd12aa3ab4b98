"""The sampler and its probes, on machines with and without a GPU."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nbdist.telemetry.probes import (
    CpuProbe,
    GpuProbe,
    _LinuxCounters,
    _PsutilCounters,
)
from nbdist.telemetry.recorder import Recorder
from nbdist.telemetry.sampler import Sampler
from nbdist.telemetry.time_split import RunningCode, TimeSplitter
from nbdist.wire import Batch, DeviceSample, Sample
from tests.processes import HANG_S, wait_until


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """NVML with one GPU, whose answers a test sets. An exception is raised."""

    def __init__(self, **answers: object) -> None:
        super().__init__(
            NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, answers=answers, calls=[]
        )

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
        nvmlDeviceGetTemperature=64,
        nvmlDeviceGetPowerUsage=312_500,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle="card",
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
    assert sample.resident == sample.memory_used == pytest.approx(resident, rel=0.2)
    assert sample.memory_total is not None
    assert sample.memory_used < sample.memory_total


def test_a_process_that_writes_has_a_disk_rate(tmp_path: Path) -> None:
    begun, before = time.monotonic(), psutil.Process().io_counters().write_bytes
    probe = CpuProbe("cpu")
    with (tmp_path / "data").open("wb") as file:
        file.write(bytes(2**22))
        file.flush()
        os.fsync(file.fileno())
    if psutil.Process().io_counters().write_bytes == before:
        pytest.skip("the temporary folder is in memory")
    written = probe.sample(0)
    seconds = time.monotonic() - begun
    assert written.disk is not None
    assert written.disk >= 2**22 / seconds
    assert written.network is not None
    idle = probe.sample(0)
    assert idle.disk is not None
    assert idle.disk < written.disk


def test_a_gpu_is_found_by_its_uuid(nvml: FakeNvml) -> None:
    probe = GpuProbe("cuda:0", "GPU-1234")
    sample = probe.sample(1)
    probe.close()
    assert ("nvmlDeviceGetHandleByUUID", "GPU-1234") in nvml.calls
    assert (sample.rank, sample.device, sample.utilisation) == (1, "cuda:0", 97.0)
    assert (sample.memory_used, sample.memory_total) == (60, 80)
    assert (sample.temperature, sample.power) == (64.0, 312.5)
    assert ("nvmlDeviceGetTemperature", "handle", 0) in nvml.calls
    assert nvml.calls[-1] == ("nvmlShutdown",)


def test_a_mig_device_has_memory_but_no_utilisation(nvml: FakeNvml) -> None:
    nvml.answers["nvmlDeviceGetUtilizationRates"] = NVMLError("Not Supported")
    sample = GpuProbe("cuda:0", "MIG-1").sample(0)
    assert sample.utilisation is None
    assert sample.memory_used == 60
    # Its temperature and power are those of the card.
    assert (sample.temperature, sample.power) == (64.0, 312.5)
    assert ("nvmlDeviceGetPowerUsage", "card") in nvml.calls
    assert ("nvmlDeviceGetMemoryInfo", "handle") in nvml.calls


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_nvml_or_the_gpu_all_values_are_none(
    nvml: FakeNvml, broken: str
) -> None:
    nvml.answers[broken] = NVMLError("Driver Not Loaded")
    probe = GpuProbe("cuda:0", "GPU-1234")
    sample = probe.sample(0)
    probe.close()
    assert (sample.utilisation, sample.memory_used, sample.memory_total) == (None,) * 3
    assert (sample.temperature, sample.power) == (None, None)
    assert sample.cpu >= 0


def test_without_pynvml_all_values_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuProbe("cuda:0", "GPU-1234").sample(0).memory_used is None


def test_the_sampler_records_samples_until_it_is_closed() -> None:
    batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    recorder = Recorder(5, batches.put, interval_s=0.01)
    sampler = Sampler(recorder, "cpu", None, idle(), lambda: 3e9, interval_s=0.02)
    first, second = batches.get(timeout=HANG_S), batches.get(timeout=HANG_S)
    assert sampler.close(HANG_S)
    assert sampler.close(HANG_S)
    assert recorder.close(HANG_S)
    for sample in first.records + second.records:
        assert isinstance(sample, DeviceSample)
        assert sample.rank == 5
        assert sample.bus_bandwidth == 3e9


def test_a_source_that_raises_is_named_once_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def bandwidth() -> float:
        raise ValueError("no such rank")

    batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    recorder = Recorder(5, batches.put, interval_s=0.01)
    sampler = Sampler(recorder, "cpu", None, idle(), bandwidth, interval_s=0.02)
    samples = [batches.get(timeout=HANG_S).records[0] for _ in range(3)]
    assert sampler.close(HANG_S)
    assert recorder.close(HANG_S)
    assert all(isinstance(sample, DeviceSample) for sample in samples)
    assert capsys.readouterr().err == (
        "nbdist: the monitor lacks the bandwidth of its collectives of rank 5: "
        "ValueError: no such rank\n"
    )


def idle() -> TimeSplitter:
    """A splitter of a thread that runs nothing."""
    return splitter_of(lambda: None)


def splitter_of(running: Callable[[], RunningCode | None]) -> TimeSplitter:
    return TimeSplitter(
        running,
        lambda _file, _line: "",
        {},
        blocked_in=lambda: "",
        waits_in_backward=lambda: False,
        device_share=lambda: 0.0,
        end="/",
    )


def test_the_shares_of_the_time_are_recorded_at_the_training_step() -> None:
    batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    recorder = Recorder(0, batches.put, interval_s=0.01)
    code = splitter_of(lambda: RunningCode("In[1]", [sys._getframe()]))
    sampler = Sampler(recorder, "cpu", None, code, lambda: None, interval_s=0.1)
    assert shares(batches).step == 0, "without a step, samples are counted"
    assert shares(batches).step == 1
    recorder.count_step("optimizer")
    recorder.count_step("optimizer")
    wait_until(lambda: shares(batches).step == 1)
    recorder.log(step=70, loss=1.0)
    wait_until(lambda: shares(batches).step == 70)
    found = shares(batches)
    assert found.is_internal
    assert found.scalars == {
        "time/compute": 1, "time/communication": 0, "time/data": 0, "time/other": 0
    }  # fmt: skip
    recorder.end_loops()
    wait_until(lambda: shares(batches).step == 71, 5)  # what was recorded is kept
    assert shares(batches).step == 72
    recorder.log(step=0, loss=1.0)
    wait_until(lambda: shares(batches).step == 0)
    assert sampler.close(HANG_S)
    assert recorder.close(HANG_S)


def shares(batches: queue.SimpleQueue[Batch]) -> Sample:
    """The next record of shares."""
    while True:
        for record in batches.get(timeout=HANG_S).records:
            if isinstance(record, Sample) and record.is_internal:
                return record


def test_of_many_ranks_on_a_host_each_looks_less_often() -> None:
    looks = [0]

    def running() -> None:
        looks[0] += 1

    recorder = Recorder(0, lambda _: None)
    begun = time.monotonic()
    code = RunningCode("In[1]", [sys._getframe()])
    counted = splitter_of(lambda: running() or code)
    sampler = Sampler(
        recorder, "cpu", None, counted, lambda: None, ranks_on_host=64, interval_s=0.3
    )
    wait_until(lambda: looks[0] >= 6)
    # One look at each sample, and one every 0.2 s between them.
    assert time.monotonic() - begun >= 5 * 0.1
    assert sampler.close(HANG_S)
    assert recorder.close(HANG_S)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_files_of_proc_say_what_psutil_says() -> None:
    linux, other = _LinuxCounters(), _PsutilCounters()
    assert linux.resident() == pytest.approx(other.resident(), rel=0.05)
    assert linux.disk() == pytest.approx(other.disk(), rel=0.05, abs=10**6)
    network = other.network()
    assert network is not None
    assert linux.network() == pytest.approx(network, rel=0.01, abs=10**6)
    linux.close()
    assert linux.disk() is None


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
    assert sample.allocated is not None
    assert sample.reserved is not None
    assert sample.reserved >= sample.allocated >= held.nbytes
    assert sample.temperature is not None
    assert sample.power is not None
