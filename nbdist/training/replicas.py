"""Whether the values of all ranks are equal, and where they differ."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nbdist.collectives import (
    Group,
    all_gather,
    all_gather_object,
    broadcast,
    default_group,
)
from nbdist.errors import ReplicasDiffer, UsageError
from nbdist.training import lasting
from nbdist.training.digest import combined, digests_of, octets_of
from nbdist.training.leaves import Leaf, leaves_of
from nbdist.training.validation import whole_number
from nbdist.wire import Comparison, LeafComparison, LeafDigest, format_ranks

__all__ = ["check_replicas", "compare", "described_leaves"]

MEASURED_LEAVES = 20
"""The most leaves whose differences are measured, because each is sent."""
TEXT_LIMIT = 40


@dataclass(eq=False)
class _Loop:
    """The calls of `check_replicas` with one model."""

    calls: int = 0
    equal_at: int = 0
    """The last call that found all ranks equal; 0 for none."""

    def _begin_again(self) -> None:
        self.calls = self.equal_at = 0  # a rank may have made one more


_loops: WeakKeyDictionary[object, _Loop] = WeakKeyDictionary()


def check_replicas(
    *replicas: nn.Module | Optimizer | Any,
    every: int = 1,
    group: Group | None = None,
) -> None:
    """Check that models and optimizers are equal on all ranks, bit for bit.

    Call it once a step, with the same arguments on every rank. Each `every` calls, the
    ranks compare digests of all parameters, buffers and states. The other calls take
    about a microsecond.

    A check reads all values once, on their device, and exchanges 24 bytes. If the
    digests differ, the first leaves that differ are sent from one rank to the others.

    Args:
        replicas: modules, optimizers, or other objects that can be weakly referenced.
        every: number of calls from one check to the next.
        group: the ranks that are compared. Default: all ranks of the world.

    Raises:
        ReplicasDiffer: on all ranks. The message has the first parameter that differs,
            the ranks, the largest difference, and the steps between which the ranks
            parted. A step is a call, counted from 1; with `every=1` the step is exact.
        UsageError: nothing was given, or a value cannot be compared.
    """
    whole_number("every", every, 1)
    if not replicas:
        raise UsageError("check_replicas() compares nothing: give it the model")
    loop = _loop_of(replicas[0])
    loop.calls += 1
    if loop.calls % every:
        return
    leaves = [
        leaf
        for name, each in zip(_names(replicas), replicas, strict=True)
        for leaf in leaves_of(name, each)
    ]
    group = group or default_group()
    digests = digests_of(leaves)
    refused = [
        f"{leaf.name}: {why}"
        for leaf, why in zip(leaves, digests, strict=True)
        if isinstance(why, str)
    ]
    if _agree(combined(leaves, digests), bool(refused), group):
        loop.equal_at = loop.calls
        return
    if refused:
        raise UsageError(f"check_replicas() cannot compare {refused[0]}")
    comparison = _compared(leaves, digests, "", group)
    raise ReplicasDiffer(_report(comparison, loop, every), comparison)


def compare(
    name: str, value: object, error: str = "", group: Group | None = None
) -> Comparison:
    """Compare a value with those of the other ranks. Every rank must call.

    Args:
        name: the value's name, with which the names of the leaves begin.
        value: this rank's value.
        error: why this rank has no value, if it has none.
        group: the ranks that are compared. Default: all ranks of the world.
    """
    leaves = [] if error else leaves_of(name, value)
    return _compared(leaves, digests_of(leaves), error, group or default_group())


# -- the exchange ----------------------------------------------------------------------


def _agree(digest: bytes, is_refused: bool, group: Group) -> bool:
    """Whether all ranks have this digest.

    Raises:
        UsageError: another rank has refused its values, and this rank has not.
    """
    words = [*struct.unpack("<2q", digest), int(is_refused)]
    mine = torch.tensor(words, dtype=torch.int64, device="cpu")
    rows = [torch.empty_like(mine) for _ in group.ranks]
    all_gather(rows, mine, group=group)
    refusing = [r for r, row in zip(group.ranks, rows, strict=True) if row[2]]
    if refusing and not is_refused:
        raise UsageError(
            f"check_replicas() cannot compare the values of rank "
            f"{format_ranks(refusing)}: the error there says why"
        )
    return not refusing and all(torch.equal(row, mine) for row in rows)


def _compared(
    leaves: Sequence[Leaf],
    digests: Sequence[bytes | str],
    error: str,
    group: Group,
) -> Comparison:
    described = described_leaves(leaves, digests)
    gathered = all_gather_object((error, described), group=group)
    errors = {r: e for r, (e, _) in zip(group.ranks, gathered, strict=True) if e}
    values = {r: v for r, (e, v) in zip(group.ranks, gathered, strict=True) if not e}
    comparison = Comparison.of(values, errors)
    mine = dict(zip((each.name for each in described), leaves, strict=True))
    found = []
    left = MEASURED_LEAVES
    for result in comparison.leaves:
        if not result.uncompared and len(result.groups) > 1 and left:
            left -= 1
            leaf = mine.get(result.name)
            if not errors and " | " not in result.form and leaf is not None:
                result = _measured(result, leaf, group)
        found.append(result)
    return replace(comparison, leaves=tuple(found))


def described_leaves(
    leaves: Sequence[Leaf], digests: Sequence[bytes | str]
) -> list[LeafDigest]:
    """The leaves for a comparison. A name that occurs again gets a number."""
    counts: Counter[str] = Counter()
    described = []
    for leaf, digest in zip(leaves, digests, strict=True):
        counts[leaf.name] += 1
        count = counts[leaf.name]
        name = leaf.name if count == 1 else f"{leaf.name} ({count})"
        described.append(LeafDigest(name, leaf.form, digest, _value(leaf)))
    return described


def _measured(result: LeafComparison, leaf: Leaf, group: Group) -> LeafComparison:
    """The differences of a leaf of one form. All ranks call this in the same order."""
    numbers = _numbers(leaf)
    if numbers is None:
        return result
    theirs = numbers.clone(memory_format=torch.contiguous_format)
    broadcast(octets_of(theirs), result.groups[0][0], group=group)
    gathered = all_gather_object(_distance(numbers, theirs), group=group)
    far = [each for each in gathered if each.count]
    return LeafComparison(
        result.name,
        result.form,
        result.groups,
        count=max(each.count for each in far),
        size=numbers.numel(),
        index=min(each.index for each in far),
        largest=max((each.largest for each in far), key=_nan_first),
    )


@dataclass(frozen=True)
class _Distance:
    """How this rank's tensor differs from the other one."""

    count: int = 0
    index: tuple[int, ...] = field(default=())
    largest: float = 0.0


@torch.no_grad()
def _distance(mine: Tensor, theirs: Tensor) -> _Distance:
    """Both have one dtype and shape. Elements differ if their bytes do."""
    width = mine.element_size()
    octets = octets_of(mine).view(-1, width) != octets_of(theirs).view(-1, width)
    places = octets.any(dim=1).nonzero().flatten()
    if not len(places):
        return _Distance()
    index = np.unravel_index(int(places[0]), tuple(mine.shape))
    wide = torch.complex128 if mine.is_complex() else torch.float64
    pair = [each.reshape(-1)[places].to(wide) for each in (mine, theirs)]
    largest = (pair[0] - pair[1]).abs().max().item()
    return _Distance(len(places), tuple(map(int, index)), largest)


def _nan_first(number: float) -> float:
    return float("inf") if number != number else number


def _numbers(leaf: Leaf) -> Tensor | None:
    """A leaf's content as a tensor of numbers; None if it has none."""
    content = leaf.content
    if isinstance(content, np.ndarray):
        if content.dtype.kind not in "biufc" or content.dtype.byteorder == ">":
            return None
        return torch.from_numpy(content.copy(order="C"))
    if isinstance(content, Tensor) and content.numel():
        return content.detach().resolve_conj().resolve_neg()
    return None


def _value(leaf: Leaf) -> str:
    """A short text of a plain value; "" for other leaves."""
    if not isinstance(leaf.content, bytes):
        return ""
    if leaf.form == "float":
        return repr(struct.unpack("<d", leaf.content)[0])
    text = leaf.content.decode("utf-8", "replace")
    return text if len(text) <= TEXT_LIMIT else f"{text[: TEXT_LIMIT - 1]}…"


# -- the loop and its report -----------------------------------------------------------


def _loop_of(first: object) -> _Loop:
    try:
        loop = _loops.get(first)
        if loop is None:
            loop = _loops[first] = _Loop()
            lasting.register(loop)
        return loop
    except TypeError:
        raise UsageError(
            f"check_replicas() counts its calls by its first argument, and a "
            f"{type(first).__name__} cannot be weakly referenced: give it the model or "
            "the optimizer first"
        ) from None


def _names(replicas: Sequence[object]) -> list[str]:
    """The names "model", "optimizer" and "value", numbered from the second on."""
    counts: Counter[str] = Counter()
    names = []
    for each in replicas:
        kinds = (nn.Module, "model"), (Optimizer, "optimizer"), (object, "value")
        name = next(name for kind, name in kinds if isinstance(each, kind))
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}{counts[name]}")
    return names


def _report(comparison: Comparison, loop: _Loop, every: int) -> str:
    differing = comparison.differing
    if loop.equal_at:
        first = loop.equal_at + 1
        when = f"step {first}" if first == loop.calls else f"steps {first}-{loop.calls}"
    else:
        when = f"step {loop.calls} or before"
    more = len(differing) - 1
    lines = [
        f"the replicas parted at {when}: {differing[0]}.",
        f"{more} more of {len(comparison.leaves)} leaves differ." if more else "",
        "With every=1 the step is exact." if every > 1 else "",
        "%dist_diff shows every leaf of a model or optimizer.",
    ]
    return " ".join(filter(None, lines))
