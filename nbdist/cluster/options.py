"""Checks of a cluster's options, before anything is started."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from nbdist.cluster.hosts import parse_hosts, slots_here
from nbdist.config import ClusterConfig
from nbdist.errors import UsageError
from nbdist.training.elastic import checkpoint
from nbdist.wire import Resume

__all__ = ["checked_script", "configured", "resume_of", "suggests_keywords"]

P = ParamSpec("P")
R = TypeVar("R")


def suggests_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise UsageError, with a suggestion, for an unknown keyword.

    The signature is preserved for type checkers and for `inspect`.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                raise UsageError(_unknown_option(name, known))
        return function(*args, **kwargs)

    return checked


def _unknown_option(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown option {name!r}: {hint}The options are {', '.join(known)}"


def configured(n: int | None, options: Mapping[str, Any]) -> ClusterConfig:
    """The configuration of a cluster, from the environment and from options.

    Args:
        n: Number of ranks; None to derive it from the host.
        options: Other fields of `ClusterConfig`; None keeps a field's default.

    Raises:
        UsageError: The value of an option is invalid.
    """
    given = {name: value for name, value in options.items() if value is not None}
    config = replace(ClusterConfig.from_environment(), n=n, **given)
    if not 0 < config.timeout_s < threading.TIMEOUT_MAX:
        raise UsageError(f"--timeout {config.timeout_s}: expected seconds above 0")
    if config.on_failure not in ("stop", "shrink", "replace"):
        raise UsageError(
            f"--on-failure {config.on_failure!r} is not known: expected stop, shrink "
            "or replace"
        )
    return config if config.hosts is None else _on_hosts(config, config.hosts)


def _on_hosts(config: ClusterConfig, hosts: str) -> ClusterConfig:
    """Derive the number of ranks from the slots, and check it."""
    slots = slots_here(parse_hosts(hosts))
    if config.n is not None and config.n > slots:
        raise UsageError(f"-n {config.n} ranks on the {slots} slots of -H {hosts}")
    return replace(config, n=slots if config.n is None else config.n)


def resume_of(config: ClusterConfig) -> Resume | None:
    """The file to resume from, after checking that it is complete.

    Raises:
        CheckpointError: Neither it nor the previous file is complete.
    """
    if config.resume is None:
        return None
    checkpoint.check(Path(config.resume))
    return Resume(str(Path(config.resume).resolve()))


def checked_script(path: str | os.PathLike[str], n_ps: int, size: int) -> Path:
    """The absolute path of a script for `size` ranks with `n_ps` parameter servers.

    Raises:
        UsageError: The file does not exist, or no worker is left.
    """
    if isinstance(n_ps, bool) or not isinstance(n_ps, int) or not 0 <= n_ps < size:
        raise UsageError(
            f"--n-ps {n_ps!r}: expected 0 to {size - 1} parameter servers of {size} "
            "ranks, because at least one rank must be a worker"
        )
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise UsageError(
            f"no script {os.fspath(path)!r}: {file} does not exist; pass a path "
            "relative to the notebook's folder, or an absolute path"
        )
    return file
