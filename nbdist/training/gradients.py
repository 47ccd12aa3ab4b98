"""Reduces gradients over the ranks while the backward pass runs.

Gradients are collected in buckets. A bucket is reduced as one tensor as soon as its
last gradient is ready (Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training", VLDB 2020; Horovod calls it tensor fusion). The order in which
gradients become ready may differ between ranks. Buckets are therefore reduced in one
order, on which all ranks agree in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from nbdist.errors import UsageError
from nbdist.training import lasting
from nbdist.training.validation import whole_number

__all__ = ["BUCKET_BYTES", "GradientReducer", "Reduction"]


BUCKET_BYTES = 25 * 2**20
"""The same as in DistributedDataParallel: large enough for the full bandwidth, small
enough that the first buckets are reduced while backward runs."""
_FIRST_BYTES = 2**20
"""Size of the first bucket, which is small so that reducing begins early."""


@dataclass(frozen=True)
class Item:
    """One gradient."""

    kind: Hashable
    """Gradients of one kind can share a buffer."""
    nbytes: int


def plan_buckets(
    items: Sequence[Item],
    order: Sequence[int],
    limit: int = BUCKET_BYTES,
    groups: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """Distribute gradients over buckets.

    Args:
        items: all gradients.
        order: indices of the gradients to distribute, in the order in which they are
            expected to be ready.
        limit: bytes after which a bucket is full; 0 for one bucket a gradient.
        groups: indices of gradients that share a bucket, whatever their size.

    Returns:
        The buckets, in the order in which they are expected to be full. Each bucket
        holds gradients of one kind. Each index in `order` is in one bucket.
    """
    wanted = set(order)
    buckets = []
    for group in groups:
        buckets += _by_kind(items, [index for index in group if index in wanted])
        wanted.difference_update(group)
    open_buckets: dict[Hashable, list[int]] = {}
    for index in order:
        if index not in wanted:
            continue
        bucket = open_buckets.setdefault(items[index].kind, [])
        bucket.append(index)
        small = _FIRST_BYTES if not buckets else limit
        if sum(items[each].nbytes for each in bucket) >= min(small, limit):
            buckets.append(open_buckets.pop(items[index].kind))
    buckets += open_buckets.values()
    position = {index: at for at, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: max(position[each] for each in bucket))


def _by_kind(items: Sequence[Item], group: Sequence[int]) -> list[list[int]]:
    kinds: dict[Hashable, list[int]] = {}
    for index in group:
        kinds.setdefault(items[index].kind, []).append(index)
    return list(kinds.values())


class Reduction(Protocol):
    """Reduces buckets of gradients. Every rank makes the same calls."""

    @property
    def size(self) -> int:
        """The number of ranks that reduce with this one, which is counted.

        With one rank nothing is reduced.
        """

    def agree(self, numbers: Tensor) -> None:
        """Sum a table of small integers over the ranks, in place.

        The first row of the result is the first rank's.
        """

    def begin(self, index: int, bucket: Tensor) -> Callable[[], object]:
        """Begin to reduce a flat bucket in place.

        Returns:
            A function that waits for the reduction.
        """

    def sparse(self, index: int, gradient: Tensor) -> Tensor:
        """Return the reduction of a sparse gradient."""


class _Bucket:
    """Gradients that share one buffer."""

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
        self.wait: Callable[[], object] | None = None
        self.sources: list[tuple[int, Tensor | None, int]] = []
        """What `fill` has copied: parameters, their gradients, and these' versions."""

    def fill(self, parameters: Sequence[Tensor]) -> None:
        """Copy the gradients into the buffer. A parameter without one gives zeros."""
        views, gradients = [], []
        self.sources = []
        for index, view in zip(self.members, self.views, strict=True):
            gradient = parameters[index].grad
            version = 0 if gradient is None else gradient._version
            self.sources.append((index, gradient, version))
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                views.append(view)
                gradients.append(_dense(gradient))
        if views:
            torch._foreach_copy_(views, gradients)

    def differs(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a gradient was changed or replaced since `fill`."""
        return any(
            parameters[index].grad is not gradient
            or (gradient is not None and gradient._version != version)
            for index, gradient, version in self.sources
        )

    def set_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Make the parameters' gradients views of the buffer, without a copy."""
        for index, view in zip(self.members, self.views, strict=True):
            if parameters[index].grad is not view:
                parameters[index].grad = view
        self.sources = []


_owners = WeakIdKeyDictionary()
"""The hook of each parameter. When a cell runs again, the hooks of the new reducer
replace these."""


class GradientReducer:
    """Reduces the gradients of some parameters, in buckets, during backward.

    After `synchronize`, `parameter.grad` is a view of a bucket, which the next step
    overwrites. Clone a gradient to keep it.

    Args:
        parameters: in the order of the model. Parameters that do not require a gradient
            now are ignored.
        reduction: reduces the buckets.
        bucket_bytes: bytes after which a bucket is full.
        passes: backward passes whose gradients are accumulated before they are reduced.
        groups: indices of parameters whose gradients share a bucket.
        sparse_as_dense: whether sparse gradients are reduced as dense ones. They are
            sparse again afterwards.
        expects_all: whether every backward belongs to a step. If False, only those do
            that follow `expect`; other gradients are reduced by `synchronize`.
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
        expects_all: bool = True,
    ) -> None:
        self._parameters = list(parameters)
        self._expects_all = expects_all
        self._reduction = reduction
        self._bucket_bytes = bucket_bytes
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._used = [
            i for i, each in enumerate(self._parameters) if each.requires_grad
        ]
        self._buckets: list[_Bucket] | None = None
        """None until the ranks have agreed on the buckets."""
        self._bucket_of: dict[int, _Bucket] = {}
        self._sparse: list[int] = []
        self._made_dense: list[int] = []
        """Parameters whose gradients are sparse, and reduced as dense ones."""
        self.set_passes(passes)
        for index in self._used:
            _install_hook(self._parameters[index], partial(self._on_gradient, index))
        lasting.register(self)

    def set_passes(self, passes: int) -> None:
        """Accumulate over this many backward passes from now on."""
        self._passes = whole_number("passes", passes, 1)
        self._reset()

    @property
    def pending(self) -> bool:
        """Whether gradients were computed since the last `synchronize`."""
        return self._dirty

    def expect(self) -> None:
        """Begin a step, whose gradients are reduced while backward computes them."""
        self.abandon()
        self._expects = True

    def abandon(self) -> None:
        """Leave a step that was not completed. Every rank must call."""
        for bucket in self._buckets or ():
            if bucket.wait is not None:
                bucket.wait()
        self._reset()

    @property
    def changed(self) -> bool:
        """Whether gradients were changed after their reduction has begun."""
        return any(
            bucket.wait is not None and bucket.differs(self._parameters)
            for bucket in self._buckets or ()
        )

    def _begin_again(self) -> None:
        """Forget a step. The ranks agree on the buckets again in the next one."""
        self._buckets = None
        self._bucket_of.clear()
        self._reset()

    def synchronize(self) -> None:
        """Wait until each parameter has its reduced gradient. Every rank must call.

        A parameter without a gradient on this rank contributes zeros.
        """
        if self._reduction.size > 1:
            if self._buckets is None:
                self._agree()
            self._begin_full(also_incomplete=True)
            for bucket in self._buckets or ():
                assert bucket.wait is not None
                bucket.wait()
                bucket.set_gradients(self._parameters)
            for index in self._made_dense:
                self._make_sparse(index)
            for index in self._sparse:
                self._reduce_sparse(index)
        self._reset()

    # -- during backward -----------------------------------------------------------

    def _reset(self) -> None:
        self._dirty = False
        self._expects = self._expects_all
        self._left = dict.fromkeys(self._used, self._passes)
        self._arrived: list[int] = []
        self._next = 0
        for bucket in self._buckets or ():
            bucket.missing, bucket.wait = len(bucket.members), None

    def _on_gradient(self, index: int, _parameter: Tensor) -> None:
        """Count a gradient. Autograd calls this for one parameter at a time."""
        if not self._expects:
            return
        left = self._left[index] = self._left[index] - 1
        self._dirty = True
        if left > 0:
            return
        if left < 0:
            raise UsageError(
                f"a gradient was computed {self._passes + 1} times before step(), and "
                f"backward_passes_per_step is {self._passes}: call step() or "
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

    def _begin_full(self, also_incomplete: bool = False) -> None:
        """Begin to reduce the buckets that have all their gradients, in their order.

        Args:
            also_incomplete: also begin with buckets that lack gradients.
        """
        buckets = self._buckets or []
        if self._reduction.size == 1:
            return
        while self._next < len(buckets):
            bucket = buckets[self._next]
            if bucket.missing and not also_incomplete:
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

    def _make_sparse(self, index: int) -> None:
        """Give back a sparse gradient, which an optimizer such as SparseAdam needs."""
        parameter = self._parameters[index]
        assert parameter.grad is not None  # it has been reduced
        parameter.grad = parameter.grad.to_sparse(1)

    # -- the plan ------------------------------------------------------------------

    def _agree(self) -> None:
        """Agree with all ranks on the buckets.

        Two rows are summed over the ranks. The first has the order in which the first
        rank's gradients arrived; other ranks contribute zeros. The second counts the
        ranks on which each gradient is sparse.
        """
        count = len(self._parameters)
        table = torch.zeros(2, count, dtype=torch.int64, device="cpu")
        for at, index in enumerate(self._arrived):
            table[0, index] = at + 1
        for index in self._used:
            gradient = self._parameters[index].grad
            table[1, index] = int(gradient is not None and gradient.is_sparse)
        self._reduction.agree(table)
        arrivals, sparse = table.tolist()
        self._made_dense = []
        if self._sparse_as_dense:
            self._made_dense = [index for index in self._used if sparse[index]]
            sparse = [0] * count
        self._sparse = [index for index in self._used if sparse[index]]
        self._make_buckets(arrivals, sparse)

    def _make_buckets(self, arrivals: list[int], sparse: list[int]) -> None:
        # Backward computes the last layers' gradients first, so gradients that have not
        # arrived yet are expected in that order.
        dense = [index for index in reversed(self._used) if not sparse[index]]
        order = sorted(dense, key=lambda index: arrivals[index] or len(arrivals) + 1)
        items = [Item((p.dtype, p.device), p.nbytes) for p in self._parameters]
        plan = plan_buckets(items, order, self._bucket_bytes, self._groups)
        self._buckets = [_Bucket(members, self._parameters) for members in plan]
        self._bucket_of = {
            index: bucket for bucket in self._buckets for index in bucket.members
        }


def _install_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Install a hook. It replaces the hook of an earlier reducer."""
    former: RemovableHandle | None = _owners.get(parameter)
    if former is not None:
        former.remove()
    _owners[parameter] = parameter.register_post_accumulate_grad_hook(hook)


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    """View a flat part in a parameter's shape, and in its strides if it is dense."""
    if like.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(like):
        return part.view(like.shape)
    return part.as_strided(like.size(), like.stride(), part.storage_offset())


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
