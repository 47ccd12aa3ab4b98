"""Descriptions of ranks, for tests without a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbdist.wire import RankInfo


def rank_info(rank: int, size: int = 2, **fields: Any) -> RankInfo:
    """The description of a CPU rank of a world on one host; `fields` replace some."""
    info = RankInfo(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        engine_uuid="",
        host="box",
        pid=100 + rank,
        device="cpu",
        device_name="cpu",
        device_uuid=None,
        memory_limit=None,
        threads=1,
        transport="",
    )
    info = replace(info, **fields)
    return replace(info, watched_pid=fields.get("watched_pid", info.pid))
