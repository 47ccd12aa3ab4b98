"""Elastic runs: a training function that continues after a rank's death."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.collectives.torch_backend.process_group import original_error
from nbdist.errors import CollectiveAborted, RestartsSpent, UsageError
from nbdist.training.device import context_error
from nbdist.training.elastic.coordinator import coordinator
from nbdist.training.elastic.ranks import ranks
from nbdist.training.elastic.state import SizeChange, State
from nbdist.training.validation import whole_number
from nbdist.wire import ElasticCall

__all__ = ["run"]

Function = Callable[..., Any]
_F = TypeVar("_F", bound=Function)


@overload
def run(function: _F, /) -> _F: ...


@overload
def run(
    *,
    max_restarts: int = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    timeout_s: float = ...,
) -> Callable[[_F], _F]: ...


def run(
    function: Function | None = None,
    /,
    *,
    max_restarts: int = 3,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    timeout_s: float = 600.0,
) -> Any:
    """Make a training function continue after a rank's death and after a resize.

    The function's first argument is a `State`. Every rank must call the function, with
    equal arguments. It starts with rank 0's values on all ranks. When a rank dies, the
    notebook replaces or drops it, as the option `--on-failure` says. Then all ranks
    restore the last commit and call the function again. The function should therefore
    read its progress from the state. It should also wrap modules in DDP itself, because
    a DDP module communicates with the ranks that existed when it was made. A rank whose
    CUDA context has failed, for instance by an illegal memory access, ends and is
    replaced or dropped in the same way, because no later call of CUDA in its process
    works. A resize by
    `cluster.scale` takes place at the next commit, and no step is lost.

    Under a plain `mpiexec` or `torchrun`, a failure is raised. The state keeps its last
    commit.

    Args:
        max_restarts: the most failures after which the function is called again. A
            resize is not counted.
        min_ranks: the least number of ranks. With fewer, the run waits for
            `cluster.scale`.
        max_ranks: the most ranks during the run; None for no limit.
        timeout_s: seconds to wait for `min_ranks` ranks.

    Raises:
        UsageError: a number is out of range. The decorated function also raises it if
            its first argument is not a `State`, or if a value of the state is wrapped
            in DDP.
        RestartsSpent: raised by the decorated function when the run cannot continue.
            The state keeps its last commit.
    """
    if not timeout_s > 0:
        raise UsageError(f"timeout_s={timeout_s!r}: expected seconds above 0")
    limits = ElasticCall(
        name="",
        max_restarts=whole_number("max_restarts", max_restarts, 0),
        min_ranks=whole_number("min_ranks", min_ranks, 1),
        max_ranks=max_ranks and whole_number("max_ranks", max_ranks, min_ranks),
        timeout_s=timeout_s,
    )
    if function is None:
        return functools.partial(_decorate, limits=limits)
    return _decorate(function, limits)


def _decorate(function: Function, limits: ElasticCall) -> Function:
    call = replace(limits, name=getattr(function, "__qualname__", repr(function)))

    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        _check(state, call.name)
        return _Run(call, state, lambda: function(state, *args, **kwargs)).go()

    return elastic


def _check(state: object, name: str) -> None:
    if not isinstance(state, State):
        raise UsageError(
            f"{name} got a {type(state).__name__}: the first argument of an elastic "
            "function must be an nbdist.elastic.State"
        )
    if state._in_run:
        raise UsageError(f"{name} was called within an elastic run of the same State")
    for key, value in state._objects.items():
        if isinstance(value, DistributedDataParallel):
            raise UsageError(
                f"{key!r} is wrapped in DDP, which works for the current ranks only: "
                f"pass the module to State, and call DDP(state.{key}) in {name}"
            )


class _Run:
    """One call of an elastic function."""

    def __init__(
        self, call: ElasticCall, state: State, body: Callable[[], Any]
    ) -> None:
        self._call = call
        self._state = state
        self._body = body

    def go(self) -> Any:
        """Call the function until it has returned on all ranks."""
        begun = coordinator().enter(self._call)
        if begun == "skip":
            return None
        self._state._in_run = True
        self._state._share(coordinator().commit_folders)
        try:
            return self._repeat(joins=begun == "join")
        finally:
            self._state._in_run = False
            self._state._unshare()
            self._state._unwrap()
            coordinator().leave()

    def _repeat(self, *, joins: bool) -> Any:
        if joins:  # a commit from a file differs from the other ranks' commit
            self._state._drop_commit()
        before = self._state._commit_number
        while True:
            value, reason, released = None, "failure", None
            try:
                begins = self._state._commit_number == before
                joins = joins and begins  # until this rank has a commit
                self._state._rendezvous(self._call.name, joins=joins, begins=begins)
                value = self._body()
                reason = "finished"
                ranks().barrier("elastic_end")
                return value
            except SizeChange:
                reason = "resize"
            except Exception as error:
                if (failed := context_error()) is not None:
                    coordinator().end_rank(failed)
                released = _release_of(error)
                if released is None:
                    raise
            if self._wait(reason, released):
                return value

    def _wait(self, reason: str, released: BaseException | None) -> bool:
        """Wait for the verdict; return whether the run has ended without an error."""
        commit = self._state._commit_number
        verdict = coordinator().pause(reason, commit, released)
        if verdict.action == "give up":
            if not verdict.why and released is not None:
                raise released
            raise RestartsSpent(f"{verdict.why}. {_kept(commit)}") from released
        return verdict.action == "finish"


def _kept(commit: int) -> str:
    if not commit:
        return "There was no commit yet"
    return f"The last commit, number {commit}, is intact: state.restore() restores it"


def _release_of(error: BaseException) -> BaseException | None:
    """The error that released this rank from a collective; None for other errors."""
    from mpi4py import MPI

    error = original_error(error)
    released = isinstance(error, (CollectiveAborted, dist.DistError, MPI.Exception))
    return error if released else None
