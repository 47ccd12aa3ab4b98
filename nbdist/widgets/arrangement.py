"""The order in which the whole output of a cell is shown when the cell has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

from nbdist.widgets.grid import fits_grid, grid
from nbdist.widgets.lines import Item, merge

__all__ = ["arrange"]

Merged = list[tuple[list[int], Item]]
Content = dict[str, Any]


def arrange(outputs: Mapping[int, deque[Item]]) -> Merged:
    """Bring output into the order of ranks, with equal items once.

    The first figures or tables of all ranks are shown side by side, then the second
    ones, and so on. The order of each rank's output is kept.

    Args:
        outputs: All output of each rank, which is emptied.

    Returns:
        Items with the ranks that have them. The payload of an item of the kind "grid"
        is a MIME bundle.
    """
    merged: Merged = []
    while any(outputs.values()):
        merged += merge(
            {rank: _before_figure(items) for rank, items in outputs.items()}
        )
        figures = {
            rank: deque([items.popleft()]) for rank, items in outputs.items() if items
        }
        merged += _side_by_side(list(merge(figures)))
    return merged


def _before_figure(items: deque[Item]) -> deque[Item]:
    """Remove and return what precedes the first figure or table."""

    def take() -> Iterator[Item]:
        while items and not _is_figure(items[0]):
            yield items.popleft()

    return deque(take())


def _is_figure(item: Item) -> bool:
    return item.kind == "display" and fits_grid(cast("Content", item.payload))


def _side_by_side(figures: Merged) -> Merged:
    """Join figures of different ranks to one item."""
    if len(figures) < 2:
        return figures
    contents = [(ranks, cast("Content", item.payload)) for ranks, item in figures]
    keys = [key for _ranks, item in figures for key in item.keys]
    everybody = sorted(rank for ranks, _item in figures for rank in ranks)
    return [(everybody, Item("grid", keys, grid(contents)))]
