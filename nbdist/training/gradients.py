"""Reducing gradients over the ranks while the backward pass is still running.

Gradients are collected in buckets, and each bucket is reduced as one tensor as soon as
its last gradient is there (Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", VLDB 2020; Horovod calls it tensor fusion). The order in which
gradients become ready may differ between ranks, therefore buckets are always reduced in
one order, that all ranks agree on in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from nbdist.errors import UsageError

from ._whole import whole
from .buckets import BUCKET_BYTES, Item, plan_buckets

__all__ = ["GradientReducer", "Reduction"]

Wait = Callable[[], object]


class Reduction(Protocol):
    """How tensors are reduced over the ranks. Every rank makes the same calls."""

    @property
    def size(self) -> int:
        """The number of ranks; of a single one, nothing is asked."""

    def agree(self, numbers: Tensor) -> None:
        """Sum small numbers over the ranks, in place."""

    def begin(self, index: int, bucket: Tensor) -> Wait:
        """Begin to reduce a flat bucket in place; a function that waits for it."""

    def sparse(self, index: int, gradient: Tensor) -> Tensor:
        """The reduction of a sparse gradient."""


class _Bucket:
    """Some gradients in one buffer."""

    def __init__(self, members: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.members = list(members)
        mine = [parameters[index] for index in members]
        lengths = [parameter.numel() for parameter in mine]
        self.flat = mine[0].new_empty(sum(lengths), requires_grad=False)
        parts = self.flat.split(lengths)
        self.views = [
            _shaped(part, like) for part, like in zip(parts, mine, strict=True)
        ]
        self.missing = len(self.members)
        self.wait: Wait | None = None

    def fill(self, parameters: Sequence[Tensor]) -> None:
        """Copy the gradients in; zeros for those that were not computed."""
        views, gradients = [], []
        for index, view in zip(self.members, self.views, strict=True):
            gradient = parameters[index].grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                views.append(view)
                gradients.append(_dense(gradient))
        if views:
            torch._foreach_copy_(views, gradients)

    def hand_out(self, parameters: Sequence[Tensor]) -> None:
        """Make the buffer's parts the gradients: nothing is copied back."""
        for index, view in zip(self.members, self.views, strict=True):
            if parameters[index].grad is not view:
                parameters[index].grad = view


_owners = WeakIdKeyDictionary()
"""Each parameter's hook. A cell that is run again makes a new reducer for them."""


class GradientReducer:
    """Reduces the gradients of some parameters, in buckets, during backward.

    Afterwards `parameter.grad` is a part of a bucket. It is overwritten in the next
    step: clone what is to be kept.

    Args:
        parameters: In the order of the model; those that need no gradient now are left
            alone.
        reduction: Does the communication.
        bucket_bytes: As `limit` of `plan_buckets`.
        passes: Backward passes to accumulate on each rank before reducing.
        groups: Indices of parameters that travel together.
        sparse_as_dense: Whether sparse gradients are made dense.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        reduction: Reduction,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        passes: int = 1,
        groups: Sequence[Sequence[int]] = (),
        sparse_as_dense: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._reduction = reduction
        self._bucket_bytes = bucket_bytes
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._used = [
            i for i, each in enumerate(self._parameters) if each.requires_grad
        ]
        self._buckets: list[_Bucket] | None = None
        """None until the ranks have agreed."""
        self._bucket_of: dict[int, _Bucket] = {}
        self._sparse: list[int] = []
        self.set_passes(passes)
        for index in self._used:
            _take(self._parameters[index], partial(self._on_gradient, index))

    def set_passes(self, passes: int) -> None:
        """Accumulate over so many backward passes from now on."""
        self._passes = whole("passes", passes, 1)
        self._reset()

    @property
    def pending(self) -> bool:
        """Whether there are gradients that `synchronize` has not seen."""
        return self._dirty

    def forget(self) -> None:
        """Agree anew in the next step: the ranks may have changed."""
        self._buckets = None
        self._bucket_of.clear()
        self._reset()

    def synchronize(self) -> None:
        """Wait until each parameter has its reduced gradient. Every rank must call.

        A parameter that had no gradient on this rank has taken part with zeros.
        """
        if self._reduction.size > 1:
            if self._buckets is None:
                self._agree()
            self._begin_full(even_if_not=True)
            for bucket in self._buckets or ():
                assert bucket.wait is not None
                bucket.wait()
                bucket.hand_out(self._parameters)
            for index in self._sparse:
                self._reduce_sparse(index)
        self._reset()

    # -- during backward -----------------------------------------------------------

    def _reset(self) -> None:
        self._dirty = False
        self._left = dict.fromkeys(self._used, self._passes)
        self._arrived: list[int] = []
        self._next = 0
        for bucket in self._buckets or ():
            bucket.missing, bucket.wait = len(bucket.members), None

    def _on_gradient(self, index: int, _parameter: Tensor) -> None:
        """Called by autograd, for one parameter at a time."""
        left = self._left[index] = self._left[index] - 1
        self._dirty = True
        if left > 0:
            return
        if left < 0:
            raise UsageError(
                "gradients were computed more often than once for each of the "
                f"{self._passes} backward passes before step(): call step() or "
                "synchronize() in between, or increase backward_passes_per_step"
            )
        if self._buckets is None:
            self._arrived.append(index)
            return
        bucket = self._bucket_of.get(index)
        if bucket is not None:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._begin_full()

    def _begin_full(self, even_if_not: bool = False) -> None:
        """Begin with those buckets, in their order, that have all their gradients."""
        buckets = self._buckets or []
        if self._reduction.size == 1:
            return
        while self._next < len(buckets):
            bucket = buckets[self._next]
            if bucket.missing and not even_if_not:
                return
            bucket.fill(self._parameters)
            bucket.wait = self._reduction.begin(self._next, bucket.flat)
            self._next += 1

    def _reduce_sparse(self, index: int) -> None:
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        parameter.grad = self._reduction.sparse(index, gradient)

    # -- the plan ------------------------------------------------------------------

    def _agree(self) -> None:
        """Make the buckets, from what the first rank saw and all have.

        Two rows are summed: the first rank's order of arrival (others give zeros), and
        on how many ranks a gradient is sparse.
        """
        count = len(self._parameters)
        table = torch.zeros(2, count, dtype=torch.int64, device="cpu")
        for at, index in enumerate(self._arrived):
            table[0, index] = at + 1
        for index in self._used:
            gradient = self._parameters[index].grad
            table[1, index] = int(gradient is not None and gradient.is_sparse)
        self._reduction.agree(table)
        places, sparse = table.tolist()
        if self._sparse_as_dense:
            sparse = [0] * count
        self._sparse = [index for index in self._used if sparse[index]]
        self._make_buckets(places, sparse)

    def _make_buckets(self, places: list[int], sparse: list[int]) -> None:
        # Backward comes to the last layers first; so do those that nobody has seen.
        dense = [index for index in reversed(self._used) if not sparse[index]]
        order = sorted(dense, key=lambda index: places[index] or len(places) + 1)
        items = [Item((p.dtype, p.device), p.nbytes) for p in self._parameters]
        plan = plan_buckets(items, order, self._bucket_bytes, self._groups)
        self._buckets = [_Bucket(members, self._parameters) for members in plan]
        self._bucket_of = {
            index: bucket for bucket in self._buckets for index in bucket.members
        }


def _take(parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Install a hook in the place of the one that another reducer has installed."""
    former: RemovableHandle | None = _owners.get(parameter)
    if former is not None:
        former.remove()
    _owners[parameter] = parameter.register_post_accumulate_grad_hook(hook)


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    """A flat part in the shape of a parameter, and in its layout where it is dense."""
    if like.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(like):
        return part.view(like.shape)
    return part.as_strided(like.size(), like.stride(), part.storage_offset())


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
