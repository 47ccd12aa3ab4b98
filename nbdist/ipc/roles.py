"""The roles worker and parameter server, and a script's variables for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Role", "environment", "role_of", "tf_config"]


class Role(NamedTuple):
    """The role of a process among those that run the same script."""

    name: str
    """"worker" or "ps"."""
    number: int
    """The process's number among those of its role, from 0."""
    of: int
    """The number of processes with this role."""


def role_of(rank: int, size: int, n_ps: int) -> Role:
    """The role of a rank: the last `n_ps` are parameter servers."""
    workers = size - n_ps
    if rank < workers:
        return Role("worker", rank, workers)
    return Role("ps", rank - workers, n_ps)


def environment(
    rank: int, size: int, n_ps: int, restarts: int = 0, max_restarts: int = 0
) -> dict[str, str]:
    """The variables that torchrun sets in addition to RANK, WORLD_SIZE and others.

    A library sees in them that a launcher has started the ranks, and starts none.

    Args:
        rank, size, n_ps: As for `role_of`.
        restarts: How often the ranks have begun again.
        max_restarts: How often they may.
    """
    role = role_of(rank, size, n_ps)
    return {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": role.name,
        "ROLE_RANK": str(role.number),
        "ROLE_WORLD_SIZE": str(role.of),
        "TORCHELASTIC_RUN_ID": "nbdist",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
    }


def tf_config(rank: int, addresses: Sequence[str], n_ps: int) -> str:
    """TensorFlow's `TF_CONFIG`.

    Args:
        addresses: "host:port" of each rank.
    """
    size = len(addresses)
    role = role_of(rank, size, n_ps)
    cluster: dict[str, list[str]] = {"worker": []}
    for other, address in enumerate(addresses):
        cluster.setdefault(role_of(other, size, n_ps).name, []).append(address)
    task = {"type": role.name, "index": role.number}
    return json.dumps({"cluster": cluster, "task": task})
