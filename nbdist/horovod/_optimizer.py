"""DistributedOptimizer: any optimizer of torch's, with gradients of all ranks."""

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
from nbdist.training.buckets import BUCKET_BYTES
from nbdist.training.gradients import GradientReducer

from ._adasum_optimizer import AdasumOptimizer
from ._bucket_reduction import BucketReduction
from ._compression import Compression, Compressor
from ._process_sets import ProcessSet, global_process_set
from ._reduce_ops import Adasum, Average, ReduceOp, Sum

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
    """An optimizer that steps with the gradients of all ranks. Every rank must call.

    Gradients are reduced in buckets while backward runs; `step()` waits for them.
    It is of a subclass of the given optimizer's class, with the same parameters,
    options and state; use it in place of the given one from then on.

    Further methods: `synchronize()` waits for the gradients, which may then be clipped;
    `with optimizer.skip_synchronize(): optimizer.step()` does not wait again.
    `zero_grad()` between backward and step raises.

    Parameters that take part on other ranks but had no gradient here, and those that
    had none anywhere, get one (of zeros, in the latter case). Those that need no
    gradient when this is called are left alone.

    Args:
        optimizer: Any of torch's; one that was wrapped before is wrapped anew.
        named_parameters: Such as `model.named_parameters()`: all of the optimizer's
            parameters, by different names.
        compression: What is done to a bucket of gradients on its way.
        backward_passes_per_step: Backward passes whose gradients are summed on each
            rank before they are reduced.
        op: Average, Sum or Adasum. With Adasum each rank takes its own step, and the
            steps are combined.
        gradient_predivide_factor: Of Average: a part of the division is done before the
            sum (1/factor), the rest after it (factor/size).
        num_groups, groups: How many groups of parameters, or which ones, to reduce as
            one bucket each; by default they are fused by size.
        sparse_as_dense: Whether sparse gradients are made dense. If not, the indices
            and values of all ranks are gathered.
        process_set: The ranks.
        fusion_threshold: Bytes of a bucket; default $HOROVOD_FUSION_THRESHOLD, or
            25 MiB.

    Raises:
        UsageError: Parameters without a name or with the same, an op that this is not
            defined for, or a number that is out of range.
    """
    if op not in (Average, Sum, Adasum):
        raise UsageError(f"op={op}: expected hvd.Average, hvd.Sum or hvd.Adasum")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise UsageError("gradient_predivide_factor is for op=hvd.Average alone")
    _check_names(optimizer, named_parameters)
    if op is Adasum:
        adasum = _of_subclass(optimizer, AdasumOptimizer)
        AdasumOptimizer.prepare(
            adasum, compression, backward_passes_per_step, process_set
        )
        return adasum
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    reduction = BucketReduction(
        op,
        gradient_predivide_factor,
        compression,
        process_set,
    )
    distributed = _of_subclass(optimizer, _Distributed)
    vars(distributed).update(
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
    return distributed


class _Distributed:
    """What the subclass of an optimizer's class does differently."""

    _reducer: GradientReducer
    _synchronized: bool
    _should_synchronize: bool

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. Every rank must call."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` not wait for gradients, after `synchronize` has."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients, then step. Every rank must call.

        Args:
            closure: Computes the loss and its gradients anew; each time they are
                reduced before the optimizer sees them.
        """
        base: Any = super()
        if closure is not None and self._should_synchronize:
            return base.step(lambda: self._evaluate(closure))
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "step() after synchronize() reduces the gradients once more: put "
                    "it in `with optimizer.skip_synchronize():`",
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
        """Drop the gradients, of which none may wait to be reduced.

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
        """Accumulate gradients over so many backward passes from now on."""
        self._reducer.set_passes(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Every rank must: they agree on their buckets anew."""
        self._reducer.forget()
        self._synchronized = False
        base: Any = super()
        base.load_state_dict(state_dict)


def _of_subclass(optimizer: Optimizer, behaviour: type) -> Optimizer:
    """The optimizer as one of a subclass, with the same groups and state."""
    base = type(optimizer)
    if issubclass(base, _Distributed | AdasumOptimizer):
        base = base.__mro__[2]  # wrapped before: the class itself, the behaviour, this
    made: Any = type(base.__name__, (behaviour, base), {"__doc__": base.__doc__})
    distributed: Optimizer = made.__new__(made)
    state = dict(vars(optimizer))
    state.pop("step", None)  # a scheduler's, bound to the given one
    vars(distributed).update(state)
    return distributed


def _check_names(optimizer: torch.optim.Optimizer, named: Named | None) -> None:
    if named is None:
        return
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
            f"named_parameters: {len(unnamed)} of the optimizer's parameters are not "
            f"there, of the shapes {unnamed[:5]}: name all, or leave it out"
        )


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
