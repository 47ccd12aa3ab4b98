"""DistributedOptimizer: an optimizer that steps with the gradients of all ranks."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from nbdist.errors import ReductionPending, UsageError
from nbdist.horovod.compression import Compression, Compressor
from nbdist.horovod.gradients import NamedReduction
from nbdist.horovod.ops.allreduce import grouped_allreduce_
from nbdist.horovod.process_sets import ProcessSet, global_process_set
from nbdist.horovod.reduce_ops import Adasum, Average, ReduceOp, Sum
from nbdist.training import lasting
from nbdist.training.gradients import BUCKET_BYTES, GradientReducer

__all__ = ["DistributedOptimizer"]

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Named = Iterable[tuple[str, Tensor]]


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    fusion_threshold: int | None = None,
) -> Optimizer:
    """Make an optimizer that steps with all ranks' gradients. Every rank must call.

    Gradients are reduced in buckets while backward runs, and `step()` waits for them.
    The class of the result is a subclass of the given optimizer's class. The result has
    the same parameters, options and state, and replaces the given optimizer.

    The result has two more methods. `synchronize()` waits for the gradients, which can
    then be clipped. `with optimizer.skip_synchronize(): optimizer.step()` then steps
    without another wait. `zero_grad()` between backward and step raises
    ReductionPending.

    A parameter without a gradient on this rank gets the reduction of the other ranks'
    gradients, or zeros if no rank has one. Parameters that do not require a gradient
    when this is called are ignored.

    Args:
        optimizer: A `torch.optim.Optimizer`. A result of this function is unwrapped
            first.
        named_parameters: All of the optimizer's parameters, with different names, such
            as `model.named_parameters()`.
        compression: Compresses a bucket of gradients before it is sent.
        backward_passes_per_step: Backward passes whose gradients are summed on each
            rank before they are reduced.
        op: Average, Sum or Adasum. With Adasum each rank takes its own step, and the
            steps are combined.
        gradient_predivide_factor: For Average: gradients are divided by this factor
            before the sum, and the sum is multiplied by factor/size.
        num_groups: The number of groups into which the parameters are divided. Each
            group is one bucket. 0 fills buckets by size.
        groups: The groups themselves, or their number.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones, and made
            sparse again. If False, the indices and values of all ranks are gathered.
        process_set: The ranks that take part. Default: all ranks. A rank outside of the
            set steps with its own gradients.
        fusion_threshold: Bytes after which a bucket is full. Default:
            $HOROVOD_FUSION_THRESHOLD, or 25 MiB.

    Raises:
        UsageError: A parameter has no name, two parameters have the same name, the op
            is another one, or a number is out of range.
    """
    if op not in (Average, Sum, Adasum):
        raise UsageError(f"op={op}: expected hvd.Average, hvd.Sum or hvd.Adasum")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise UsageError(
            f"gradient_predivide_factor={gradient_predivide_factor} with op={op}: it "
            "applies only to op=hvd.Average"
        )
    names = _names(optimizer, named_parameters)
    if op is Adasum:
        adasum = _of_subclass(optimizer, _Adasum)
        vars(adasum).update(_parameter_names=names)
        _Adasum.prepare(adasum, compression, backward_passes_per_step, process_set)
        return adasum
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    reduction = NamedReduction(
        op,
        gradient_predivide_factor,
        compression,
        process_set,
    )
    distributed = _of_subclass(optimizer, _Distributed)
    vars(distributed).update(
        _parameter_names=names,
        _reducer=GradientReducer(
            parameters,
            reduction,
            bucket_bytes=_bucket_bytes(fusion_threshold),
            passes=backward_passes_per_step,
            groups=_chosen_groups(parameters, groups or num_groups),
            sparse_as_dense=sparse_as_dense,
        ),
        _synchronized=False,
        _should_synchronize=True,
    )
    lasting.register(distributed)  # type: ignore[arg-type]
    return distributed


class _Distributed:
    """The methods of a DistributedOptimizer that differ from its base class."""

    _reducer: GradientReducer
    _synchronized: bool
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. Every rank must call."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block in which `step` does not wait. Call `synchronize` before it."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients, then step. Every rank must call.

        Args:
            closure: Computes the loss and its gradients again. The gradients are
                reduced after each call.
        """
        base: Any = super()
        if closure is not None and self._should_synchronize:
            return base.step(lambda: self._evaluate(closure))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() "
                    "after optimizer.synchronize(): the gradients are reduced again. "
                    "Put it in `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return base.step() if closure is None else base.step(closure)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self._reducer.synchronize()
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients. Call it before backward, or after step.

        Raises:
            ReductionPending: Backward has run, and neither step nor synchronize has.
        """
        if self._reducer.pending:
            raise ReductionPending(
                "zero_grad() after backward() and before step() or synchronize(): the "
                "gradients are being reduced; call it before backward()"
            )
        base: Any = super()
        base.zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients over this number of backward passes from now on."""
        self._reducer.set_passes(passes)

    def _begin_again(self) -> None:
        self._synchronized, self._should_synchronize = False, True


class _Adasum:
    """The methods of a DistributedOptimizer with Adasum.

    Each rank's step is reduced, not its gradient, as in section 4 of the paper. The
    result therefore includes momentum and Adam's scaling.
    """

    _compression: type[Compressor]
    _process_set: ProcessSet
    _passes: int
    _passes_left: int
    param_groups: list[dict[str, Any]]

    @staticmethod
    def prepare(
        optimizer: Any,
        compression: type[Compressor],
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        """Set the attributes that an instance has in addition to its base class's."""
        vars(optimizer).update(_compression=compression, _process_set=process_set)
        optimizer.set_backward_passes_per_step(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Part of Horovod's interface. Gradients add up until `step` in any case."""
        if passes < 1:
            raise UsageError(f"backward_passes_per_step {passes}: expected 1 or more")
        self._passes = passes

    def synchronize(self) -> None:
        """Do nothing: the ranks communicate in `step`."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not available: with Adasum each rank keeps its own gradients.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "skip_synchronize() has no meaning with op=hvd.Adasum: clip each rank's "
            "own gradients, then call step()"
        )
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the combined step of all ranks. Every rank must call."""
        parameters = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        starts = [parameter.detach().clone() for parameter in parameters]
        base: Any = super()
        loss = base.step() if closure is None else base.step(closure)
        self._combine(parameters, starts)
        return loss

    @torch.no_grad()
    def _combine(self, parameters: list[Tensor], starts: list[Tensor]) -> None:
        if not parameters:
            return
        packed = [
            self._compression.compress(parameter - start)
            for parameter, start in zip(parameters, starts, strict=True)
        ]
        steps = grouped_allreduce_(
            [step for step, _ in packed], op=Adasum, process_set=self._process_set
        )
        for parameter, start, step, (_, context) in zip(
            parameters, starts, steps, packed, strict=True
        ):
            parameter.copy_(start + self._compression.decompress(step, context))


def _of_subclass(optimizer: Optimizer, behaviour: type) -> Optimizer:
    """A copy of the optimizer in a subclass, with the same groups and state."""
    base = type(optimizer)
    if issubclass(base, _Distributed | _Adasum):
        base = base.__mro__[2]  # wrapped before: made class, behaviour, base
    made: Any = type(base.__name__, (behaviour, base), {"__doc__": base.__doc__})
    distributed: Optimizer = made.__new__(made)
    state = dict(vars(optimizer))
    state.pop("step", None)  # a scheduler wrapped it, bound to the given optimizer
    vars(distributed).update(state)
    return distributed


def _names(optimizer: torch.optim.Optimizer, named: Named | None) -> dict[Tensor, str]:
    """The name of each parameter, which Horovod has in `optimizer._parameter_names`."""
    if named is None:
        return {
            parameter: f"allreduce.noname.{group_at}.{at}"
            for group_at, group in enumerate(optimizer.param_groups)
            for at, parameter in enumerate(group["params"])
        }
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise UsageError(
            "named_parameters: expected pairs of a name and a parameter, such as "
            "model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"named_parameters: more than one is named {', '.join(twice)}")
    known = {id(parameter) for _, parameter in pairs}
    unnamed = [
        tuple(each.shape)
        for group in optimizer.param_groups
        for each in group["params"]
        if id(each) not in known
    ]
    if unnamed:
        raise UsageError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of "
            f"the shapes {unnamed[:5]}: name all, or leave named_parameters out"
        )
    return {parameter: name for name, parameter in pairs}


def _bucket_bytes(threshold: int | None) -> int:
    if threshold is None:
        threshold = int(os.environ.get("HOROVOD_FUSION_THRESHOLD") or BUCKET_BYTES)
    if threshold < 0:
        raise UsageError(f"fusion_threshold {threshold}: expected 0 or more bytes")
    return threshold


def _chosen_groups(
    parameters: Sequence[Tensor], groups: int | Sequence[Sequence[Tensor]]
) -> list[list[int]]:
    """Indices of the parameters of each group."""
    if isinstance(groups, int):
        if groups < 0:
            raise UsageError(f"groups {groups}: expected 0 or more, or parameters")
        count = len(parameters)
        groups = min(groups, count)
        edges = [count * i // groups for i in range(groups + 1)] if groups else []
        return [list(range(*pair)) for pair in itertools.pairwise(edges)]
    places = {id(parameter): at for at, parameter in enumerate(parameters)}
    found = [[places[id(each)] for each in group if id(each) in places]
             for group in groups]  # fmt: skip
    flat = list(itertools.chain.from_iterable(found))
    if len(set(flat)) != len(flat):
        raise UsageError("groups: a parameter is in more than one group")
    return found
