"""`hvd.run`: calls a function on every rank, from the notebook or a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nbdist.errors import UsageError, WrongProcess
from nbdist.session import running_cluster

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    *,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    verbose: int | bool | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on every rank, from the notebook or a script.

    The call uses the notebook's running cluster. If no cluster runs, it starts one and
    stops it at the end. Each line of a rank's output is printed with the rank's number.

    Args:
        func: The function. It is pickled by value if the ranks cannot import it.
        args, kwargs: Arguments of the function, which are copied to each rank.
        np: The number of ranks. Default: that of the running cluster or of `hosts`,
            else the number that `%dist_start` chooses.
        num_proc: The same as `np`, by its newer name.
        hosts: Hosts and ranks, such as "localhost:4", as for `%dist_start -H`.
        start_timeout: Seconds until every rank must have started.
        use_gloo, use_mpi, verbose: Part of Horovod's signature; not used.

    Returns:
        Each rank's return value, in rank order.

    Raises:
        CellError: `func` raised on a rank.
        UsageError: The running cluster has another number of ranks.
        StartError: The ranks did not start.
        WrongProcess: This process is a rank.
    """
    world = sys.modules.get("nbdist.engine.world")
    if world is not None and world.is_joined():
        raise WrongProcess(
            "hvd.run() runs in the notebook or a script, and this process is a rank: "
            "call the function itself"
        )
    if np is not None and num_proc not in (None, np):
        raise UsageError(f"np={np} and num_proc={num_proc}: expected one of them")
    np = num_proc if np is None else np
    cluster = running_cluster()
    if cluster is not None:
        if np not in (None, cluster.size) or hosts is not None:
            raise UsageError(
                f"hvd.run(np={np}, hosts={hosts!r}), but the notebook's cluster has "
                f"{cluster.size} ranks: leave out np and hosts, or run %dist_stop first"
            )
        return _call(cluster, func, args, kwargs or {})
    from nbdist.clusters.cluster import Cluster  # imports ipyparallel

    with Cluster(np, hosts=hosts, timeout_s=start_timeout) as own:
        return _call(own, func, args, kwargs or {})


def _call(
    cluster: Any,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    printer = _Printer()
    results: list[Any] = cluster.run(func, *args, observer=printer, **kwargs)
    printer.close()
    return results


class _Printer:
    """Prints the ranks' output line by line."""

    def __init__(self) -> None:
        self._rest: dict[tuple[int, str], str] = {}

    def take(self, event: Any) -> None:
        message = event.output
        if message is None or message["msg_type"] != "stream":
            return
        key = event.rank, message["content"]["name"]
        *lines, self._rest[key] = (
            self._rest.get(key, "") + message["content"]["text"]
        ).split("\n")
        for line in lines:
            self._print(key, line)

    def due(self) -> float | None:
        return None

    def notice(self, text: str) -> None:
        if text:
            print(text, file=sys.stderr)

    def make_room(self) -> None:
        pass

    def close(self) -> None:
        for key, line in self._rest.items():
            if line:
                self._print(key, line)

    def _print(self, key: tuple[int, str], line: str) -> None:
        rank, name = key
        print(f"[{rank}] {line}", file=getattr(sys, name))
