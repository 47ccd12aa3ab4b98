"""Some ranks of a cluster, with the cluster's calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from nbdist.clusters.futures import CallFuture
from nbdist.clusters.observer import QUIET, Observer
from nbdist.clusters.result import CellResult
from nbdist.wire import format_ranks

if TYPE_CHECKING:
    from nbdist.clusters.cluster import Cluster

__all__ = ["RankSelection"]

T = TypeVar("T")


@dataclass(frozen=True)
class RankSelection:
    """Some ranks of a cluster. `Cluster.on` returns it.

    Each method calls the cluster's method of this name for these ranks, with the same
    arguments, results and errors. Results are in rank order. The ranks are checked at
    each call, because the size of the world may change.
    """

    cluster: Cluster
    ranks: tuple[int, ...]
    """The ranks' numbers, in ascending order."""

    def __repr__(self) -> str:
        return f"<rank {format_ranks(self.ranks) or '(none)'} of {self.cluster!r}>"

    @overload
    def execute(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        check: bool = True,
        number: int | None = None,
        observer: Observer = QUIET,
        wait: Literal[True] = True,
    ) -> CellResult: ...

    @overload
    def execute(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        check: bool = True,
        number: int | None = None,
        observer: Observer = QUIET,
        wait: Literal[False],
    ) -> CallFuture[CellResult]: ...

    def execute(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        check: bool = True,
        number: int | None = None,
        observer: Observer = QUIET,
        wait: bool = True,
    ) -> CellResult | CallFuture[CellResult]:
        """Run a cell on these ranks; as `Cluster.execute`."""
        options: dict[str, Any] = {
            "timeout_s": timeout_s,
            "check": check,
            "number": number,
            "observer": observer,
            "wait": wait,
        }
        cell: CellResult | CallFuture[CellResult] = self.cluster.execute(
            code, self.ranks, **options
        )
        return cell

    @overload
    def run(
        self,
        fn: Callable[..., Awaitable[T]],
        *args: Any,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: Literal[True] = True,
        **kwargs: Any,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: Literal[True] = True,
        **kwargs: Any,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., Awaitable[T]],
        *args: Any,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: Literal[False],
        **kwargs: Any,
    ) -> CallFuture[list[T]]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: Literal[False],
        **kwargs: Any,
    ) -> CallFuture[list[T]]: ...

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        wait: bool = True,
        **kwargs: Any,
    ) -> list[Any] | CallFuture[list[Any]]:
        """Call a function on these ranks; as `Cluster.run`."""
        return self.cluster._start_run(
            fn, args, kwargs, self.ranks, timeout_s, observer, wait
        )

    def push(self, timeout_s: float | None = None, /, **values: Any) -> None:
        """Copy values to these ranks, as variables; as `Cluster.push`."""
        self.cluster.push(self.ranks, timeout_s, **values)

    def pull(self, expression: str, *, timeout_s: float | None = None) -> list[Any]:
        """Evaluate an expression on each of these ranks; as `Cluster.pull`."""
        return self.cluster.pull(expression, self.ranks, timeout_s=timeout_s)

    def inspect(
        self, expression: str, *, timeout_s: float | None = None
    ) -> dict[int, str]:
        """The values of an expression on these ranks, as text; as `Cluster.inspect`."""
        return self.cluster.inspect(expression, self.ranks, timeout_s=timeout_s)

    def __getitem__(self, expression: str) -> list[Any]:
        return self.pull(expression)

    def __setitem__(self, name: str, value: Any) -> None:
        self.push(**{name: value})
