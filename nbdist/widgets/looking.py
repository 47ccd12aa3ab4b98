"""The tables of the magics that look into the ranks' values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from nbdist.widgets.table import Table
from nbdist.wire import Comparison, LeafComparison, Shown, Variable, format_ranks

__all__ = ["diff_table", "values_table", "variables_table"]

T = TypeVar("T", Shown, Variable)


def variables_table(answers: Mapping[int, Sequence[Variable] | None]) -> Table:
    """The ranks' variables by name. Equal values share a row.

    Args:
        answers: The variables of each rank; None for a rank that does not answer.
    """
    silent = [rank for rank, answer in answers.items() if answer is None]
    by_name: dict[str, dict[int, Variable]] = {}
    for rank, variables in answers.items():
        for variable in variables or []:
            by_name.setdefault(variable.name, {})[rank] = variable
    everywhere = len(answers) - len(silent)
    rows: list[list[object]] = []
    reasons: dict[str, str] = {}
    for name in sorted(by_name):
        for ranks, each in _alike(by_name[name]):
            shape = "" if each.shape is None else tuple(each.shape)
            form = [each.kind, shape, each.dtype, each.device]
            rows.append([name, _where(ranks, everywhere, each), *form, each.value])
            if each.uncompared:
                reasons.setdefault(name, each.uncompared)
    header = ["name", "ranks", "type", "shape", "dtype", "device", "value"]
    notes = [f"{name} is not compared: {why}" for name, why in reasons.items()]
    if silent:
        notes.append(f"rank {format_ranks(silent)} does not answer")
    return Table(header, rows, "\n".join(notes))


def values_table(expression: str, shown: Mapping[int, Shown | None]) -> Table:
    """The value of an expression on the ranks. Equal values share a row.

    Args:
        shown: The value of each rank; None for a rank that does not answer.
    """
    groups = _alike({rank: each for rank, each in shown.items() if each is not None})
    rows = [[_where(ranks, 0, each), each.text] for ranks, each in groups]
    reasons = dict.fromkeys(each.uncompared for _, each in groups if each.uncompared)
    notes = [f"not compared: {why}" for why in reasons]
    silent = [rank for rank, each in shown.items() if each is None]
    if silent:
        notes.append(f"rank {format_ranks(silent)} does not answer")
    return Table(["ranks", expression], rows, "\n".join(notes))


def diff_table(
    expression: str, comparison: Comparison, *, everything: bool = False
) -> Table:
    """The leaves of a value that differ or cannot be compared, the first one first.

    Args:
        everything: Include the leaves that are equal.
    """
    chosen = [leaf for leaf in comparison.leaves if everything or not leaf.is_equal]
    rows = [[leaf.name, leaf.form, _verdict(leaf), leaf.difference] for leaf in chosen]
    return Table(
        ["leaf", "form", "ranks", "difference"], rows, _summary(expression, comparison)
    )


def _verdict(leaf: LeafComparison) -> str:
    if leaf.uncompared:
        return f"not compared: {leaf.uncompared}"
    if leaf.is_equal:
        return "equal"
    most, *others = map(format_ranks, leaf.groups)
    return f"{' | '.join(others)} differ from {most}"


def _summary(expression: str, comparison: Comparison) -> str:
    count, different = len(comparison.leaves), comparison.differing
    notes = [f"rank {rank} has no value: {e}" for rank, e in comparison.errors.items()]
    ranks = [rank for rank in comparison.ranks if rank not in comparison.errors]
    leaves = "1 leaf" if count == 1 else f"{count:,} leaves"
    if different:
        notes.append(f"{len(different):,} of {leaves} differ. First, {different[0]}")
    elif comparison.uncompared:
        open_ = len(comparison.uncompared)
        notes.append(f"{open_:,} of {leaves} cannot be compared; the others are equal")
    elif ranks:
        where = f"rank {format_ranks(ranks)}"
        notes.append(f"{expression} is equal on {where}, bit for bit, in {leaves}")
    return "\n".join(notes)


def _alike(values: Mapping[int, T]) -> list[tuple[list[int], T]]:
    """The ranks of each distinct value.

    Values that are not compared are together if everything known of them is equal.
    """
    groups: dict[Hashable, tuple[list[int], T]] = {}
    for rank, value in values.items():
        key = value if value.uncompared else value.digest
        groups.setdefault(key, ([], value))[0].append(rank)
    return list(groups.values())


def _where(ranks: Sequence[int], everywhere: int, value: Variable | Shown) -> str:
    """The ranks of one row, and whether their values are not compared."""
    text = "all" if len(ranks) == everywhere else format_ranks(ranks)
    return f"{text}, not compared" if value.uncompared else text
