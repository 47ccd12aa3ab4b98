"""The widgets that the ranks of a cell display: a row for each rank."""

from __future__ import annotations

import contextvars
import html
from collections.abc import Callable
from typing import Any, Protocol

import ipywidgets
from IPython.display import display, update_display

from nbdist.widgets.rank_widget import RankWidget
from nbdist.widgets.rank_widgets import RankWidgets
from nbdist.widgets.widget_text import WIDGET_VIEW

__all__ = ["OutputView", "WidgetBoard"]

Message = dict[str, Any]
STYLE = "margin:0;padding:0 8px;font-size:13px;white-space:pre-wrap"


class OutputView(Protocol):
    """Shows the output of a rank's callbacks."""

    def take_output(self, rank: int, message: Message) -> None: ...

    def end_output(self, rank: int) -> None: ...


class WidgetBoard:
    """A display with one row for each rank, in rank order. It begins empty.

    Make it in the context of the notebook's cell, in which it shows what the callbacks
    of its widgets print.

    Args:
        identifier: A unique name.
        widgets: The widgets of the ranks.
        make_view: Makes a view for the output of some callbacks.
    """

    def __init__(
        self,
        identifier: str,
        widgets: RankWidgets,
        make_view: Callable[[int], OutputView],
    ) -> None:
        self._identifier = identifier
        self._widgets = widgets
        self._make_view = make_view
        self._context = contextvars.copy_context()
        self._rows: dict[tuple[int, str], _Row] = {}
        """By rank and engine."""
        self._box = ipywidgets.VBox()
        self._views: dict[int, OutputView] = {}
        self.is_shown = False
        self._is_closed = False
        widgets.add_place(self)

    def add(self, widget: RankWidget) -> None:
        """Add a widget to the row of its rank."""
        key = widget.rank, widget.engine
        if key not in self._rows:
            self._rows[key] = _Row(widget.rank)
            rows = [self._rows[name].box for name in sorted(self._rows)]
            self._box.children = rows
        self._rows[key].add(widget)

    def show(self) -> None:
        """Display the board, unless it is displayed already."""
        if not self.is_shown:
            self.is_shown = True
            display(self._bundle(), raw=True, display_id=self._identifier)

    def refresh(self) -> None:
        """Bring the text up to date that a notebook without widgets shows."""
        if self.is_shown:
            update_display(self._bundle(), raw=True, display_id=self._identifier)

    def owns(self, comm: str) -> bool:
        """Whether this widget is in a row."""
        return any(
            comm in self._widgets.tree(widget.name)
            for row in list(self._rows.values())
            for widget in list(row.widgets)
        )

    def take_output(self, rank: int, message: Message | None) -> None:
        """Show below the cell what a callback prints; None is the callback's end."""
        # A copy, because another thread may be in the context.
        self._context.copy().run(self._take_output, rank, message)

    def _take_output(self, rank: int, message: Message | None) -> None:
        if message is not None:
            if rank not in self._views:
                self._views[rank] = self._make_view(rank)
            self._views[rank].take_output(rank, message)
        elif rank in self._views:
            self._views.pop(rank).end_output(rank)

    def release(self, engine: str) -> None:
        """Replace the widgets of an engine that has ended by their texts."""
        for (_rank, name), row in list(self._rows.items()):
            if name == engine:
                row.freeze(self._widgets.text_of, " (ended)")

    def close(self) -> None:
        """Replace the display by its text."""
        for row in self._rows.values():
            row.freeze(self._widgets.text_of)
        self._is_closed = True
        if self.is_shown:
            bundle, name = self._bundle(), self._identifier
            self._context.copy().run(update_display, bundle, raw=True, display_id=name)
        for row in self._rows.values():
            row.close()
        _close(self._box)

    def _bundle(self) -> dict[str, Any]:
        rows = [self._rows[key] for key in sorted(self._rows)]
        text = "\n".join(row.text(self._widgets.text_of) for row in rows)
        page = f'<pre style="{STYLE}">{html.escape(text)}</pre>'
        bundle: dict[str, Any] = {"text/plain": text, "text/html": page}
        if not self._is_closed and self._box.comm is not None:
            bundle[WIDGET_VIEW] = self._box.get_view_spec()
        return bundle


class _Row:
    """The widgets of one rank, after its number."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.widgets: list[RankWidget] = []
        self._frozen: str | None = None
        """The text of the widgets, once their rank has ended."""
        self._label = ipywidgets.Label(
            f"rank {rank}",
            layout=ipywidgets.Layout(flex="0 0 auto", min_width="7em"),
        )
        self._place = ipywidgets.Box(
            layout=ipywidgets.Layout(flex_flow="row wrap", flex="1 1 auto")
        )
        self.box = ipywidgets.HBox([self._label, self._place])

    def add(self, widget: RankWidget) -> None:
        self.widgets.append(widget)
        self._place.children = [each for each in self.widgets if each.comm is not None]

    def text(self, text_of: Callable[[RankWidget], str]) -> str:
        shown = self._frozen
        if shown is None:
            living = [each for each in self.widgets if each.comm is not None]
            shown = "  ".join(map(text_of, living))
        return f"{self._label.value}  {shown}"

    def freeze(self, text_of: Callable[[RankWidget], str], why: str = "") -> None:
        """Replace the widgets by their texts."""
        if self._frozen is None:
            living = [each for each in self.widgets if each.comm is not None]
            self._frozen = "  ".join(map(text_of, living))
            self._label.value = f"rank {self._rank}{why}"
            self._place.children = [ipywidgets.Label(self._frozen)]

    def close(self) -> None:
        for each in (*self._place.children, self._label, self._place, self.box):
            _close(each)


def _close(widget: Any) -> None:
    """Close a widget and those that describe its looks."""
    for part in (getattr(widget, "style", None), widget.layout, widget):
        if part is not None:
            part.close()
