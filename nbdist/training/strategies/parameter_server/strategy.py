"""ParameterServer: the strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from nbdist.collectives import Post, all_gather_object, default_group
from nbdist.errors import UsageError

from ..base import Strategy, begin_alike
from ..wrapped_optimizer import trained_parameters
from .optimizer import PushOptimizer
from .roles import Roles, shards_by_bytes
from .server import REDUCTIONS, Server, combine
from .server_sync import share
from .shards import Shards
from .update_policy import Async, Ledger, Report, Sync
from .worker import Worker

__all__ = ["ParameterServer"]

Result = TypeVar("Result")
Mode = Literal["sync", "async"]


class ParameterServer(Strategy):
    """The last ranks hold the parameters; the others push gradients and pull.

    After Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
    OSDI 2014. The training runs within `run`, which all ranks call: on a worker it
    calls the function, on a server it serves until every worker has finished, failed or
    died, and returns what the lowest worker has returned. At its end all ranks have the
    same parameters. Buffers, such as running statistics, are each worker's own.

    A worker that fails or dies leaves the others to go on. When a server dies the
    workers are released with an error; once another rank has taken its place, the next
    `run` goes on from the last snapshot of its shard, which a worker has kept.

    Args:
        n_ps: servers; each holds whole parameters, about equally many bytes.
        mode: "sync" averages the workers' gradients for each update; "async" applies
            each as it comes.
        max_staleness: of "async": how many steps a worker may be ahead of the slowest.
        replicas: of "sync": how many gradients make an update; those of later workers
            are dropped. Default: all workers'.
        snapshot_every: updates from one snapshot of a shard to the next; None for none.

    Raises:
        UsageError: an argument makes no sense.
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
                f"max_staleness={max_staleness}: expected 0 or more, with mode='async'"
            )
        if replicas is not None and (mode == "async" or replicas < 1):
            raise UsageError(
                f"replicas={replicas}: expected 1 or more, with mode='sync'"
            )
        if snapshot_every is not None and snapshot_every < 1:
            raise UsageError(f"snapshot_every={snapshot_every}: expected 1 or more")
        self.n_ps, self.mode = n_ps, mode
        self.max_staleness, self.replicas = max_staleness, replicas
        self.snapshot_every = snapshot_every
        self.reports: list[Report] = []
        """What each server had counted when `run` last ended, also in earlier runs."""
        self._shards: Shards | None = None
        self._post: Post | None = None
        self._worker: Worker | None = None

    # -- who is who ----------------------------------------------------------------

    @property
    def roles(self) -> Roles:
        """Which ranks serve, and which work."""
        return Roles(default_group().size, self.n_ps)

    @property
    def replica(self) -> int | None:
        """This rank's number among the workers; None on a server."""
        rank = default_group().rank
        return rank if rank in self.roles.workers else None

    @property
    def num_replicas(self) -> int:
        """The number of workers."""
        return len(self.roles.workers)

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients came so many updates late, on all servers together."""
        return sum((report.staleness for report in self.reports), Counter())

    # -- the protocol --------------------------------------------------------------

    def setup(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[nn.Module, Optimizer]:
        """The model itself, and an optimizer whose `step` pushes and pulls.

        Every rank must call. The servers run `optimizer`; its options, such as learning
        rates that a worker's scheduler sets, go to them.

        Raises:
            UsageError: there are not enough ranks, workers or parameters.
        """
        workers = len(self.roles.workers)
        if self.replicas is not None and self.replicas > workers:
            raise UsageError(f"replicas={self.replicas}: there are {workers} workers")
        parameters = trained_parameters(optimizer)
        sizes = [each.numel() * each.element_size() for each in parameters]
        shards = shards_by_bytes(sizes, self.n_ps)
        begin_alike(model)
        self._shards = Shards(
            [[parameters[place] for place in shard] for shard in shards], optimizer
        )
        delegate = PushOptimizer(optimizer, self._push)
        self._meet()
        return model, delegate

    def run(
        self,
        fn: Callable[..., Result],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Result:
        """Train: see the class. Every rank must call.

        Args:
            fn: a whole training, best; each `run` ends with a meeting of all workers.
            args, kwargs: what to call it with.

        Returns:
            What it has returned; on a server, what it has on the lowest worker that has
            finished. It must be picklable.
        """
        if self._shards is None:
            raise UsageError("run(): call setup(model, optimizer) first")
        if self._post is None or self._post.broken:
            self._meet()
        assert self._post is not None
        if self.replica is None:
            result: Result = self._serve(self._post, self._shards)
            return result
        return self._work(self._post, self._shards, fn, args, kwargs or {})

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The results of replicas in this process: none on a server."""
        return () if self.replica is None else (value,)

    def _combine(self, op: str, tensor: Tensor) -> Tensor:
        """Within `run` the workers alone reduce; elsewhere all ranks must call."""
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
        post: Post,
        shards: Shards,
        fn: Callable[..., Result],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Result:
        worker = self._worker = Worker(
            post, self.roles.servers, shards.tensors, shards.versions, shards.keep
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

    def _serve(self, post: Post, shards: Shards) -> Any:
        assert shards.store is not None
        servers, ledger = self.roles.servers, self._ledger(shards.report)
        server = Server(
            post, self.roles.workers, shards.store, ledger, self.snapshot_every
        )
        try:
            result = server.serve()
            self.reports = share(post, servers, shards.tensors, shards.report)
        except BaseException as error:
            post.abort(error)
            raise
        return result

    def _ledger(self, report: Report) -> Ledger:
        if self.mode == "async":
            return Async(report, self.max_staleness)
        return Sync(report, self.replicas or self.num_replicas)

    def _meet(self) -> None:
        """Bring all ranks, of the world as it is, up to date. Every rank must call."""
        assert self._shards is not None
        self._post = Post(default_group())
        self._shards.meet(self.roles)

    def __getstate__(self) -> dict[str, Any]:
        # A rank that joins gets a copy of another one's, and meets the others anew.
        return {**self.__dict__, "_post": None, "_worker": None}
