"""What a user asks of a cluster, checked before anything runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbdist.cluster.hosts import parse_hosts, slots_here
from nbdist.config import ClusterConfig
from nbdist.errors import UsageError
from nbdist.training import checkpoint
from nbdist.wire import Resume

__all__ = ["configured", "resume_of"]


def configured(n: int | None, options: Mapping[str, Any]) -> ClusterConfig:
    """The configuration of a cluster, from the environment and from what is given.

    Args:
        n: Number of ranks; None to decide.
        options: Other fields of `ClusterConfig`; what is None counts as not given.

    Raises:
        UsageError: An option is unknown or makes no sense.
    """
    unknown = options.keys() - ClusterConfig.__dataclass_fields__.keys()
    if unknown:
        known = ", ".join(sorted(ClusterConfig.__dataclass_fields__))
        raise UsageError(f"unknown option {sorted(unknown)}: expected {known}")
    given = {name: value for name, value in options.items() if value is not None}
    config = replace(ClusterConfig.from_environment(), n=n, **given)
    if not 0 < config.timeout_s < threading.TIMEOUT_MAX:
        raise UsageError(
            f"--timeout {config.timeout_s} is not a number of seconds above 0"
        )
    if config.on_failure not in ("stop", "shrink", "replace"):
        raise UsageError(
            f"--on-failure {config.on_failure!r} is not known: expected stop, shrink "
            "or replace"
        )
    return config if config.hosts is None else _on_hosts(config, config.hosts)


def _on_hosts(config: ClusterConfig, hosts: str) -> ClusterConfig:
    """As many ranks as there are slots, if it is not said how many."""
    slots = slots_here(parse_hosts(hosts))
    if config.n is not None and config.n > slots:
        raise UsageError(f"-n {config.n} ranks on the {slots} slots of -H {hosts}")
    return replace(config, n=slots if config.n is None else config.n)


def resume_of(config: ClusterConfig) -> Resume | None:
    """The file to resume from, once it was found whole.

    Raises:
        CheckpointError: Neither it nor the previous one is.
    """
    if config.resume is None:
        return None
    checkpoint.check(Path(config.resume))
    return Resume(str(Path(config.resume).resolve()))
