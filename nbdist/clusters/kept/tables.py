"""What the magics of kept clusters show."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from nbdist.clusters.kept.messages import Cell, Description
from nbdist.widgets.table import Table, seconds_text
from nbdist.wire import format_ranks

__all__ = ["attached_text", "clusters_table", "hours_text"]


def clusters_table(clusters: Sequence[Description]) -> Table:
    """The kept clusters of a user, a row for each."""
    header = ["name", "ranks", "started", "notebook", "does", "host", "folder"]
    rows = [
        [
            each.name,
            _ranks_text(each),
            _time_text(each.begun),
            _notebook_text(each),
            each.doing or "idle",
            each.host,
            each.folder,
        ]
        for each in clusters
    ]
    return Table(header, rows, "" if rows else "no cluster is kept")


def attached_text(cluster: Description, cells: Sequence[Cell]) -> str:
    """What a notebook that has just attached finds."""
    lines = [
        f"attached to {cluster.name}: {_ranks_text(cluster)}, started "
        f"{_time_text(cluster.begun)} in {cluster.folder}"
    ]
    for cell in cells:
        state = "has ended" if cell.is_done else "still runs"
        name = f"In[{cell.number}]" if cell.number else cell.code
        lines.append(f"{name} {state}, and its output follows")
    return "\n".join(lines)


def hours_text(hours: float) -> str:
    """A number of hours, as text."""
    if hours < 1:
        return seconds_text(hours * 3600)
    return "1 hour" if hours == 1 else f"{hours:g} hours"


def _ranks_text(cluster: Description) -> str:
    if not cluster.size:
        return "" if not cluster.begun else "starting or stopped"
    ranks = f"{cluster.size} rank{'' if cluster.size == 1 else 's'}"
    died = format_ranks(cluster.died)
    return f"{ranks}, rank {died} has died" if died else ranks


def _notebook_text(cluster: Description) -> str:
    """Who is attached, or when the cluster ends."""
    if cluster.holder is not None:
        who = "this one" if cluster.holder.pid == os.getpid() else "process"
        pid = "" if who == "this one" else f" {cluster.holder.pid}"
        return f"{who}{pid}, since {_time_text(cluster.holder.since)}"
    if cluster.ends is None:
        return ""
    return f"none: ends in {seconds_text(max(0.0, cluster.ends - time.time()))}"


def _time_text(moment: float) -> str:
    """A time of day, with the date if it is not today."""
    if not moment:
        return ""
    then, now = time.localtime(moment), time.localtime()
    is_today = then[:3] == now[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", then)
