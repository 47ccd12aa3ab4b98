"""The ParameterServer strategy: some ranks hold the parameters, the others train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbdist.collectives import TolerantMessages, all_gather_object, default_group
from nbdist.errors import UsageError
from nbdist.training import lasting
from nbdist.training.strategies.base import Strategy, broadcast_model
from nbdist.training.strategies.parameter_server.message_bodies import MessageBodies
from nbdist.training.strategies.parameter_server.server import (
    REDUCTIONS,
    Server,
    combine,
)
from nbdist.training.strategies.parameter_server.server_sync import exchange_shards
from nbdist.training.strategies.parameter_server.shards import (
    Roles,
    Shards,
    shards_by_bytes,
)
from nbdist.training.strategies.parameter_server.update_policy import (
    AsyncUpdates,
    Report,
    SyncUpdates,
    UpdatePolicy,
)
from nbdist.training.strategies.parameter_server.worker import Worker
from nbdist.training.strategies.wrapped_optimizer import (
    WrappedOptimizer,
    trained_parameters,
)

__all__ = ["ParameterServer"]

Result = TypeVar("Result")
Mode = Literal["sync", "async"]


class ParameterServer(Strategy):
    """The last ranks hold the parameters; the other ranks compute gradients.

    A rank that holds parameters is a *server*. A *worker* computes gradients, pushes
    them to the servers, and pulls the new parameters.

    After Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
    OSDI 2014. The training runs within `run`, which all ranks call. On a worker, `run`
    calls the training function. On a server, `run` serves until every worker has
    finished, failed or died, and returns the result of the lowest worker. When `run`
    returns, all ranks have the same parameters. Buffers, such as running statistics,
    differ between workers.

    When a worker fails or dies, the other workers continue. When a server dies, the
    workers are released with an error. Once another rank has replaced the server, the
    next `run` continues from the last snapshot of its shard, which a worker has kept.

    Args:
        n_ps: number of servers. Each server holds whole parameters; all servers hold
            about the same number of bytes.
        mode: "sync" averages the workers' gradients for each update; "async" applies
            each gradient when it arrives.
        max_staleness: for "async", the most steps that a worker may be ahead of the
            slowest worker. Default: no bound.
        replicas: for "sync", the number of gradients that are averaged for an update.
            Later gradients are dropped. Default: the number of workers.
        snapshot_every: updates between two snapshots of a shard; None for no snapshots.

    Raises:
        UsageError: an argument is out of range, or does not apply to the mode.
    """

    def __init__(
        self,
        n_ps: int = 1,
        mode: Mode = "sync",
        max_staleness: int | None = None,
        replicas: int | None = None,
        *,
        snapshot_every: int | None = 100,
    ) -> None:
        super().__init__()
        if mode not in ("sync", "async"):
            raise UsageError(f"mode={mode!r}: expected 'sync' or 'async'")
        if max_staleness is not None and (mode == "sync" or max_staleness < 0):
            raise UsageError(
                f"max_staleness={max_staleness}, mode={mode!r}: expected max_staleness "
                "of 0 or more, and only with mode='async'"
            )
        if replicas is not None and (mode == "async" or replicas < 1):
            raise UsageError(
                f"replicas={replicas}, mode={mode!r}: expected replicas of 1 or more, "
                "and only with mode='sync'"
            )
        if snapshot_every is not None and snapshot_every < 1:
            raise UsageError(f"snapshot_every={snapshot_every}: expected 1 or more")
        self.n_ps, self.mode = n_ps, mode
        self.max_staleness, self.replicas = max_staleness, replicas
        self.snapshot_every = snapshot_every
        self.reports: list[Report] = []
        """The counts of each server over all runs, at the end of the last `run`."""
        self._shards: Shards | None = None
        self._messages: TolerantMessages | None = None
        self._bodies: MessageBodies | None = None
        self._worker: Worker | None = None
        lasting.register(self)

    def _begin_again(self) -> None:
        """Have the next `run` connect the ranks, and give the shards to all of them."""
        self._messages = self._bodies = self._worker = None

    # -- roles ---------------------------------------------------------------------

    @property
    def roles(self) -> Roles:
        """Which ranks are servers, and which are workers."""
        return Roles(default_group().size, self.n_ps)

    @property
    def replica(self) -> int | None:
        """The number of this rank among the workers; None on a server."""
        rank = default_group().rank
        return rank if rank in self.roles.workers else None

    @property
    def num_replicas(self) -> int:
        """The number of workers."""
        return len(self.roles.workers)

    @property
    def staleness(self) -> Counter[int]:
        """The number of gradients on all servers, by staleness (see `Report`)."""
        return sum((report.staleness for report in self.reports), Counter())

    # -- the protocol --------------------------------------------------------------

    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Return the model, and an optimizer whose `step` pushes and pulls.

        Every rank must call. The servers run `optimizer`. Workers send them its
        options, such as a learning rate that a scheduler has set.

        Raises:
            UsageError: there are too few ranks, workers or parameters.
        """
        workers = len(self.roles.workers)
        if self.replicas is not None and self.replicas > workers:
            raise UsageError(f"replicas={self.replicas}: there are {workers} workers")
        parameters = trained_parameters(optimizer)
        sizes = [each.numel() * each.element_size() for each in parameters]
        shards = shards_by_bytes(sizes, self.n_ps)
        broadcast_model(model)
        self._shards = Shards(
            [[parameters[place] for place in shard] for shard in shards], optimizer
        )
        pushing = PushOptimizer(optimizer, self._push)
        self._connect()
        return model, pushing

    def run(
        self,
        fn: Callable[..., Result],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Result:
        """Call a function on every worker while the servers serve.

        Every rank must call.

        Args:
            fn: preferably a whole training, because all workers wait for each other at
                the end of `run`.
            args, kwargs: arguments of `fn`.

        Returns:
            The result of `fn`, which must be picklable; on a server, the result of the
            lowest worker that has finished.

        Raises:
            UsageError: `setup` was not called.
            CollectiveAborted: a server has died; on a server, no worker has finished.
        """
        if self._shards is None:
            raise UsageError("run(): call setup(model, optimizer) first")
        if self._messages is None or self._messages.broken:
            self._connect()
        assert self._messages is not None
        if self.replica is None:
            result: Result = self._serve(self._messages, self._shards)
            return result
        return self._work(self._messages, self._shards, fn, args, kwargs or {})

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The results of the replicas in this process, of which a server has none."""
        return () if self.replica is None else (value,)

    def _combine(self, op: str, tensor: Tensor) -> Tensor:
        """Reduce over the workers. Outside of `run`, servers must call too."""
        numbers = tensor.double().cpu().reshape(-1)
        if self._worker is not None:
            result = self._worker.reduce(REDUCTIONS.index(op), numbers)
        else:
            mine = None if self.replica is None else numbers
            every = all_gather_object(mine)
            result = combine(op, [each for each in every if each is not None])
        return result.view(tensor.shape).to(tensor.device, tensor.dtype)

    # -- the two roles -------------------------------------------------------------

    def _work(
        self,
        messages: TolerantMessages,
        shards: Shards,
        fn: Callable[..., Result],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Result:
        assert self._bodies is not None
        assert self.replica is not None
        worker = self._worker = Worker(
            messages,
            self._bodies,
            self.replica,
            self.roles.servers,
            shards.tensors,
            shards.versions,
            shards.keep,
        )
        try:
            result = fn(*args, **kwargs)
            self.reports = worker.finish(result)
        except BaseException:
            worker.leave()
            raise
        finally:
            self._worker = None
            shards.versions = worker.versions
        return result

    def _push(self, options: Sequence[dict[str, Any]]) -> None:
        if self._worker is None:
            raise UsageError(
                "optimizer.step() outside of run(): put the training in a function and "
                "call strategy.run(function) on all ranks"
            )
        self._worker.push(options)

    def _serve(self, messages: TolerantMessages, shards: Shards) -> Any:
        assert self._bodies is not None
        assert shards.store is not None
        servers, policy = self.roles.servers, self._policy(shards.report)
        server = Server(
            messages,
            self._bodies,
            servers.index(messages.rank),
            self.roles.workers,
            shards.store,
            policy,
            self.snapshot_every,
        )
        try:
            result = server.serve()
            self.reports = exchange_shards(
                messages, servers, shards.tensors, shards.report
            )
        except BaseException as error:
            messages.abort(error)
            raise
        return result

    def _policy(self, report: Report) -> UpdatePolicy:
        if self.mode == "async":
            return AsyncUpdates(report, self.max_staleness)
        return SyncUpdates(report, self.replicas or self.num_replicas)

    def _connect(self) -> None:
        """Connect the ranks of the current world, and give each shard to its server.

        Every rank must call.
        """
        assert self._shards is not None
        self._messages = TolerantMessages(default_group())
        self._bodies = MessageBodies.connect(
            default_group(), self.roles, self._shards.tensors
        )
        self._shards.assign(self.roles)

    def __getstate__(self) -> dict[str, Any]:
        # A rank that joins gets a copy of this object, and makes its own connections.
        return {**self.__dict__, "_messages": None, "_bodies": None, "_worker": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        lasting.register(self)


class PushOptimizer(WrappedOptimizer):
    """Pushes gradients and pulls parameters instead of computing a step.

    Args:
        inner: the optimizer that the servers run. On a worker it only holds options.
        push: called with the options of each parameter group; pushes the gradients and
            pulls the parameters.
    """

    def __init__(
        self, inner: Optimizer, push: Callable[[Sequence[dict[str, Any]]], None]
    ) -> None:
        super().__init__(inner)
        self._push = push

    @torch.no_grad()
    def exchange(self) -> None:
        """Push the gradients, and wait for the parameters from the servers."""
        self._push(
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in self.param_groups
            ]
        )
