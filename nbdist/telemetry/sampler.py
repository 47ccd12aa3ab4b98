"""Samples a rank's device and process once a second, in a thread."""

from __future__ import annotations

import threading

from nbdist.telemetry.probes import CpuProbe, GpuProbe, Probe
from nbdist.telemetry.recorder import Recorder

__all__ = ["Sampler"]


class Sampler:
    """Records a `wire.DeviceSample` of this rank at a fixed interval.

    Args:
        recorder: Receives the samples, and holds the rank's number.
        device: torch's name of the rank's device: "cpu" or "cuda:0".
        device_uuid: NVML's UUID of the GPU or MIG device; None on a CPU rank.
        interval_s: Seconds between two samples.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: str,
        device_uuid: str | None,
        *,
        interval_s: float = 1.0,
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._device_uuid = device_uuid
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="nbdist-sampler", daemon=True
        )
        self._thread.start()

    def close(self, timeout: float = 1.0) -> bool:
        """End the thread. Returns whether it ended within `timeout` seconds.

        Safe to call twice.
        """
        self._closed.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        probe = self._probe()  # in the thread, because NVML may take a second to start
        while not self._closed.wait(self._interval_s):
            self._recorder.record(probe.sample(self._recorder.rank))
        probe.close()

    def _probe(self) -> Probe:
        if self._device_uuid is None:
            return CpuProbe(self._device)
        return GpuProbe(self._device, self._device_uuid)
