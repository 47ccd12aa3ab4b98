"""Numbers that the documentation gives are those of the code."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from nbdist import Cluster, await_workers
from nbdist.config import ClusterConfig, CollectiveConfig, OutputConfig

DOCS = Path(__file__).parents[1] / "docs"

PROMISED = [
    ("clusters.stall_detector.NOTICE_AFTER_S", 10.0, "reliability.md",
     "no rank makes progress for 10 s"),
    ("clusters.call_supervisor.INTERRUPT_GRACE_S", 5.0, "reliability.md",
     "does not react to the interrupt for 5 s"),
    ("clusters.rank_registry.KILL_TIMEOUT_S", 60.0, "reliability.md",
     "waits up to 60 s for it"),
    ("clusters.rank_registry.POLL_S", 0.5, "reliability.md",
     "it looks for deaths twice a second"),
    ("clusters.recovery.ANSWER_TIMEOUT_S", 30.0, "reliability.md",
     "does not answer for 30 s in a recovery"),
    ("clusters.recovery.MOST_TRIES", 2, "reliability.md",
     "cannot be replaced in two tries"),
    ("clusters.supervisor_client.LOOK_S", 0.5, "architecture.md",
     "look at processes twice a second"),
    ("clusters.placement.DEFAULT_CPU_RANKS", 4, "running.md",
     "without GPUs one per core, at most 4"),
    ("clusters.placement.RANKS_PER_CORE", 8, "running.md",
     "more than 8 ranks per core"),
    ("clusters.placement.RANK_BYTES", 250_000_000, "running.md", "250 MB each"),
    ("clusters.placement.CONTEXT_BYTES", 512 * 2**20, "running.md", "less 512 MiB"),
    ("clusters.kept.kept_cluster.DEFAULT_HOURS", 12.0, "running.md",
     "no notebook was attached for 12 hours"),
    ("clusters.prompts.SAME_RANK_S", 0.5, "debugging.md", "within half a second"),
    ("collectives.call_timing.LARGE_BYTES", 64 << 10, "monitor.md",
     "collective of at least 64 KiB"),
    ("collectives.transports.mpi.RING_FROM_BYTES", 64 << 10, "collectives.md",
     "`MPI_Iallreduce` below 64 KiB"),
    ("collectives.transports.shared_memory.AT_ONCE_BYTES", 32 << 10, "collectives.md",
     "Up to 32 KiB, each rank copies"),
    ("collectives.group._FINISH_WITHIN_S", 10.0, "collectives.md", "waits up to 10 s"),
    ("engine.calls.VARIABLE_LIMIT_S", 5.0, "running.md", "take longer than 5 seconds"),
    ("engine.error_text.MOST_LETTERS", 100_000, "running.md", "100,000 characters"),
    ("engine.error_text.END_FRAMES", 50, "running.md", "100 frames"),
    ("engine.error_text.MESSAGE_S", 3.0, "running.md", "3 seconds for its `__str__`"),
    ("engine.inspection.LOOK_LIMIT_S", 5.0, "running.md", "for at most 5 s"),
    ("ipc.direct_socket.MOST_BYTES", 64 << 10, "architecture.md",
     "unless one exceeds 64 KiB"),
    ("ipc.flight_record.CALLS", 1000, "debugging.md", "its last 1,000 collectives"),
    ("ipc.private_files.RUN_FOLDER_BYTES", 32 << 20, "reliability.md", "32 MB"),
    ("telemetry.collector.MAX_METRICS", 200, "monitor.md", "At most 200 metrics"),
    ("telemetry.collector.MARKS_OF_A_KIND", 50, "monitor.md",
     "The last 50 events of each kind"),
    ("telemetry.progress.FRESH_S", 3.0, "monitor.md", "no step for 3 s"),
    ("telemetry.progress.FRESH_STEPS", 3, "monitor.md", "and for three steps"),
    ("telemetry.sampler.LOOKS_OF_HOST", 32, "monitor.md", "look 32 times a second"),
    ("telemetry.time_split.LOOKS", 100, "monitor.md", "last 100 looks"),
    ("training.gradients.BUCKET_BYTES", 25 << 20, "horovod.md", "has 25 MiB"),
    ("training.replicas.MEASURED_LEAVES", 20, "debugging.md", "the first 20 leaves"),
    ("widgets.cell_view.MOST_LINES", 1000, "running.md", "first 1000 lines"),
    ("widgets.cell_view.MOST_KEPT_ITEMS", 1000, "running.md", "more than 1000 lines"),
    ("widgets.display.UPDATE_S", 30.0, "monitor.md", "each 30 s of a long cell"),
    ("widgets.long_search.MOST_SHOWN", 200, "running.md", "the first 200 of them"),
    ("widgets.terminal_monitor.EVERY_S", 0.5, "monitor.md", "again twice a second"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "page", "sentence"), PROMISED, ids=[row[0] for row in PROMISED]
)
def test_a_number_is_that_of_its_page(
    name: str, value: float, page: str, sentence: str
) -> None:
    module, _, constant = name.rpartition(".")
    assert getattr(importlib.import_module(f"nbdist.{module}"), constant) == value
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    assert sentence in text


def test_the_defaults_of_a_cluster() -> None:
    config, output = ClusterConfig(), OutputConfig()
    assert (config.n, config.device, config.on_failure) == (None, "auto", "replace")
    assert (config.timeout_s, config.host_timeout_s) == (120.0, 15.0)
    assert (config.oversubscribe, config.launcher) == (False, "auto")
    assert (output.cap_mb, output.widgets) == (1.0, True)
    collectives = CollectiveConfig()
    assert (collectives.transport, collectives.timeout_s) == ("auto", None)
    assert (collectives.slot_bytes, collectives.staging_bytes) == (512 << 10, 4 << 20)
    assert (collectives.check, collectives.compiled) == (True, True)
    assert collectives.compression is None


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [(await_workers, "timeout_seconds", 60), (Cluster.execute, "timeout_s", None)],
)
def test_the_default_of_an_argument(function: object, name: str, value: object) -> None:
    assert inspect.signature(function).parameters[name].default == value  # type: ignore[arg-type]
