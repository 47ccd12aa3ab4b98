"""The tables of the magics that look into the ranks' values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from html import escape
from typing import TypeVar

from nbdist.widgets.grid import Content, Grid
from nbdist.widgets.table import Table, bytes_text
from nbdist.wire import (
    Comparison,
    HeldTensor,
    LeafComparison,
    MemoryReport,
    Shown,
    Variable,
    format_ranks,
)

__all__ = [
    "diff_table",
    "memory_table",
    "tensors_table",
    "values_table",
    "variables_table",
]

T = TypeVar("T", Shown, Variable)

NOTABLE_BYTES = 1 << 20
"""Memory below this needs no explanation."""


def variables_table(
    answers: Mapping[int, Sequence[Variable] | None], pattern: str
) -> Table:
    """The ranks' variables by name. Equal values share a row.

    Args:
        answers: The variables of each rank; None for a rank that does not answer.
        pattern: That of the variables' names.
    """
    by_name: dict[str, dict[int, Variable]] = {}
    for rank, variables in answers.items():
        for variable in variables or []:
            by_name.setdefault(variable.name, {})[rank] = variable
    everywhere = sum(answer is not None for answer in answers.values())
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
    notes += _silence(answers)
    if not rows:
        every = pattern == "*"
        notes.insert(0, "no variables" if every else f"no variable matches {pattern}")
    return Table(header, rows, "\n".join(notes))


def values_table(expression: str, shown: Mapping[int, Shown | None]) -> Table | Grid:
    """The value of an expression on the ranks. Equal values share a row.

    If a value has an image, as a figure has, the values are in a grid.

    Args:
        shown: The value of each rank; None for a rank that does not answer.
    """
    groups = _alike({rank: each for rank, each in shown.items() if each is not None})
    texts = _with_differences([each for _, each in groups])
    rows = [
        [_where(ranks, 0, each), text]
        for (ranks, each), text in zip(groups, texts, strict=True)
    ]
    reasons = dict.fromkeys(each.uncompared for _, each in groups if each.uncompared)
    notes = [f"not compared: {why}" for why in reasons]
    notes += _silence(shown)
    if any(each.image for _, each in groups):
        return Grid([(ranks, _display(each)) for ranks, each in groups], notes)
    return Table(["ranks", expression], rows, "\n".join(notes))


def _display(shown: Shown) -> Content:
    """A value with an image, or without, as a front end displays it."""
    if shown.image:
        return {"data": {"image/png": shown.image, "text/plain": shown.text}}
    text = f"<pre>{escape(shown.text)}</pre>"
    return {"data": {"text/html": text, "text/plain": shown.text}}


def _with_differences(shown: Sequence[Shown]) -> list[str]:
    """The texts of distinct values. Rows of their tables that differ are marked."""
    differs = [
        len(set(digests)) > 1 and all(digests)
        for digests in zip(*(each.rows for each in shown), strict=False)
    ]
    texts = []
    for each in shown:
        lines = each.text.split("\n")
        first = len(lines) - len(each.rows)
        for number, mark in enumerate(differs):
            lines[first + number] += "  differs" if mark else ""
        texts.append("\n".join(lines))
    return texts


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


def memory_table(reports: Mapping[int, MemoryReport | None]) -> Table:
    """The memory that each rank holds on each device.

    Args:
        reports: The report of each rank; None for a rank that does not answer.
    """
    rows: list[list[object]] = []
    notes: list[str] = []
    for rank, report in reports.items():
        if report is None:
            continue
        for device in sorted({*report.totals, "cpu"}):
            total, count = report.totals.get(device, 0), report.counts.get(device, 0)
            of_torch, of_process, unseen = _sizes_on(device, total, report.sizes)
            tensors = [f"{count:,}", bytes_text(total)]
            rows.append([rank, device, *tensors, of_torch, of_process])
            if unseen > NOTABLE_BYTES:
                notes.append(
                    f"rank {rank}: {bytes_text(unseen)} on {device} are in tensors "
                    "that no Python object refers to, such as those that autograd has "
                    "saved for backward"
                )
    notes += _silence(reports)
    tensors = ["tensors", "their memory"]
    header = ["rank", "device", *tensors, "torch's allocator", "process"]
    return Table(header, rows, "\n".join(notes))


def tensors_table(reports: Mapping[int, MemoryReport | None], count: int) -> Table:
    """The largest tensors of the ranks. Tensors of one name and form share a row.

    Args:
        reports: As for `memory_table`.
        count: The number of rows.
    """
    alike: dict[tuple[object, ...], tuple[HeldTensor, Counter[int]]] = {}
    answered = 0
    notes: dict[str, list[int]] = {}
    for rank, report in reports.items():
        if report is None:
            continue
        answered += 1
        if report.note:
            notes.setdefault(report.note, []).append(rank)
        for held in report.largest:
            kind_of_device = held.device.partition(":")[0]
            form = held.kind, held.shape, held.dtype, kind_of_device, held.size
            _, numbers = alike.setdefault((held.name, *form), (held, Counter()))
            numbers[rank] += 1
    rows: list[list[object]] = []
    ordered = sorted(alike.values(), key=lambda each: -each[0].size)
    for held, numbers in ordered[:count]:
        where = "all" if len(numbers) == answered else format_ranks(numbers)
        name, number = held.name or "(no name leads to it)", max(numbers.values())
        name = f"{name} ×{number}" if number > 1 else name
        size = bytes_text(held.size)
        rows.append([name, where, held.kind, held.shape, held.dtype, size])
    header = ["largest tensors", "ranks", "class", "shape", "dtype", "memory"]
    texts = [f"rank {format_ranks(ranks)}: {note}" for note, ranks in notes.items()]
    return Table(header, rows, "\n".join(texts))


def _sizes_on(
    device: str, total: int, sizes: Mapping[str, int | None]
) -> tuple[str, str, int]:
    """What torch's allocator and the process hold, and the bytes of unseen tensors."""
    if device == "cpu":
        return "", bytes_text(sizes.get("resident")), 0
    allocated, reserved = sizes.get("allocated"), sizes.get("reserved")
    if allocated is None or reserved is None:
        return "", "", 0
    of_torch = f"{bytes_text(allocated)} of {bytes_text(reserved)} reserved"
    if (limit := sizes.get("limit")) is not None:
        of_torch += f", at most {bytes_text(limit)}"
    return of_torch, bytes_text(sizes.get("process")), allocated - total


def _silence(answers: Mapping[int, object]) -> list[str]:
    """A note on the ranks that do not answer."""
    silent = [rank for rank, answer in answers.items() if answer is None]
    return [f"rank {format_ranks(silent)} does not answer"] if silent else []


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
        verb = "differs" if count == 1 else "differ"
        notes.append(f"{len(different):,} of {leaves} {verb}. First, {different[0]}")
    elif comparison.uncompared:
        open_ = len(comparison.uncompared)
        notes.append(f"{open_:,} of {leaves} cannot be compared; the others are equal")
    elif ranks:
        where = f"rank {format_ranks(ranks)}"
        notes.append(f"{expression} is equal on {where}, bit for bit, in {leaves}")
    if comparison.were_busy and different:
        notes.append(
            "a rank was busy: the ranks may have been at different steps, and the "
            "differences of tensors were not measured"
        )
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
