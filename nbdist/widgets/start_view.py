"""The progress of a start, and the table of ranks at its end."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nbdist.widgets.live_text import live_text
from nbdist.widgets.table import Table, bytes_text
from nbdist.wire import RankInfo

__all__ = ["StartView", "rank_table"]


class StartView:
    """A text that changes while the ranks start, and then a table of them."""

    _count = 0

    def __init__(self, n: int) -> None:
        StartView._count += 1
        self._text = live_text(f"nbdist-start-{StartView._count}-{time.time_ns()}")
        self._n = n
        self._begun = time.monotonic()

    def __enter__(self) -> StartView:
        self._show("starting the controller")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        if kind is not None:
            text = self._timed(f"the start of {self._n} ranks failed")
            page = f"<pre>{html.escape(text)}</pre>"
            self._text.close({"text/plain": text, "text/html": page})

    def show(self, progress: Any) -> None:
        """Show a `cluster.startup.Progress`."""
        if progress.waits_for:
            self._show(progress.waits_for)
            return
        if progress.hosts and not progress.assignments:
            states = (f"{host} {state}" for host, state in progress.hosts.items())
            self._show(f"hosts: {', '.join(states)}")
            return
        devices = Counter(
            f"{each.gpu_name} on {each.host}" for each in progress.assignments
        )
        where = ", ".join(f"{count} × {device}" for device, count in devices.items())
        stages = Counter(progress.stages.values())
        doing = ", ".join(f"{count} {stage}" for stage, count in stages.items())
        controller = "ready" if progress.controller else "starting"
        self._show(
            f"controller {controller} · {progress.ready}/{self._n} ranks ready"
            f" ({where})"
            + (f" · {doing}" if doing and progress.ready < self._n else "")
        )

    def finish(self, infos: Sequence[RankInfo], mpi: str) -> None:
        """Show the table of ranks in place of the progress."""
        table = rank_table(infos, f"{mpi}; started in {self._elapsed():.1f} s")
        self._text.close({"text/plain": repr(table), "text/html": table._repr_html_()})

    def _show(self, text: str) -> None:
        self._text.show(self._timed(text))

    def _timed(self, text: str) -> str:
        return f"{text} · {self._elapsed():.1f} s"

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun


def rank_table(infos: Sequence[RankInfo], caption: str) -> Table:
    """The ranks: where each is, and what it may use."""
    header = ["rank", "host", "pid", "device", "memory", "threads", "transport"]
    spans_hosts = len({info.host for info in infos}) > 1
    if spans_hosts:
        header[2:2] = ["local rank", "interface"]
    rows = [
        [
            info.rank,
            info.host,
            *([info.local_rank, info.interface] if spans_hosts else []),
            info.pid,
            f"{info.device} ({info.device_name})" if info.device_uuid else info.device,
            bytes_text(info.memory_limit),
            info.threads,
            info.transport,
        ]
        for info in infos
    ]
    return Table(header, rows, caption)
