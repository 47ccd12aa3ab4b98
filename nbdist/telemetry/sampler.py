"""Samples a rank's device, process and main thread, in a thread."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from nbdist.ipc.gpu_threads import use_gpu
from nbdist.telemetry.probes import CpuProbe, GpuProbe, Probe
from nbdist.telemetry.recorder import Recorder
from nbdist.telemetry.time_split import TimeSplitter
from nbdist.wire import ACTIVITIES, SHARES

__all__ = ["Sampler"]


LOOK_S = 0.05
"""Seconds between two looks at the main thread while it runs code, on a host with few
ranks."""
LOOKS_OF_HOST = 32
"""The looks of all ranks of a host in a second. Each takes about 100 µs."""
LONGEST_LOOK_S = 0.25


class Sampler:
    """Records a `wire.DeviceSample` of this rank at a fixed interval.

    Args:
        recorder: Receives the samples, and holds the rank's number.
        device: torch's name of the rank's device: "cpu" or "cuda:0".
        device_uuid: UUID of the GPU or MIG device; None on a CPU rank.
        splitter: Looks at the rank's main thread.
        bandwidth: The bandwidth of the fastest collective since the last call.
        ranks_on_host: The number of ranks on the host. Of many, each looks less often.
        interval_s: Seconds between two samples.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: str,
        device_uuid: str | None,
        splitter: TimeSplitter,
        bandwidth: Callable[[], float | None],
        *,
        ranks_on_host: int = 1,
        interval_s: float = 1.0,
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._device_uuid = device_uuid
        self._splitter = splitter
        self._bandwidth = bandwidth
        self._look_s = min(max(LOOK_S, ranks_on_host / LOOKS_OF_HOST), LONGEST_LOOK_S)
        self._interval_s = interval_s
        self._missing: set[str] = set()
        """The sources that have raised, of which the user was told."""
        # Released by `close`. A lock wakes its thread in half of an event's time.
        self._open = threading.Lock()
        self._open.acquire()
        self._thread = threading.Thread(
            target=self._run, name="nbdist-sampler", daemon=True
        )
        self._thread.start()

    def close(self, timeout: float = 1.0) -> bool:
        """End the thread. Returns whether it ended within `timeout` seconds.

        Safe to call twice.
        """
        if self._open.locked():
            self._open.release()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._device_uuid is not None:
            use_gpu(self._device)
        probe = self._probe()  # in the thread, because NVML may take a second to start
        due = time.monotonic() + self._interval_s
        pause_s = self._interval_s
        while not self._open.acquire(timeout=pause_s):
            runs = False
            with self._telling("its main thread's activity"):
                runs = self._splitter.look()
            if time.monotonic() >= due:
                self._take(probe)
                due = time.monotonic() + self._interval_s
            left_s = max(0.0, due - time.monotonic())
            pause_s = min(left_s, self._look_s) if runs else left_s
        probe.close()

    def _take(self, probe: Probe) -> None:
        bandwidth, split, latest = None, None, None
        with self._telling("the bandwidth of its collectives"):
            bandwidth = self._bandwidth()
        with self._telling("its shares of time"):
            split, latest = self._splitter.split(), self._splitter.latest()
        with self._telling(f"device {self._device}"):
            sample = probe.sample(self._recorder.rank)
            self._recorder.record(replace(sample, split=split, bus_bandwidth=bandwidth))
        if latest is not None:
            names = (f"{SHARES}{activity}" for activity in ACTIVITIES)
            self._recorder.record_shares(dict(zip(names, latest.shares, strict=True)))

    @contextlib.contextmanager
    def _telling(self, source: str) -> Iterator[None]:
        """Go on without a source that raises, and write once that it is missing."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the others must not end with it
            if source not in self._missing:
                self._missing.add(source)
                print(
                    f"nbdist: the monitor lacks {source} of rank "
                    f"{self._recorder.rank}: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )

    def _probe(self) -> Probe:
        if self._device_uuid is None:
            return CpuProbe(self._device)
        return GpuProbe(self._device, self._device_uuid)
