"""Figures and tables of several ranks, side by side.

They are HTML that any notebook viewer shows. Viewers that do not trust a notebook
remove inline SVG, and show images whose data is in the URL.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

from nbdist.wire import format_ranks

__all__ = ["Content", "Grid", "fits_grid", "grid"]

Content = dict[str, Any]
"""The content of a message that displays something."""

BINARY_IMAGES = ("image/png", "image/jpeg")
SVG = "image/svg+xml"
HTML = "text/html"
GRID = "display:flex;flex-wrap:wrap;align-items:flex-start;gap:8px 24px"


def fits_grid(content: Content) -> bool:
    """Whether a display has a form that a grid can show.

    A display with an identifier has none, because its rank may change it later.
    """
    is_named = "display_id" in content.get("transient", {})
    return not is_named and any(
        form in content["data"] for form in (*BINARY_IMAGES, SVG, HTML)
    )


def grid(displays: Sequence[tuple[Sequence[int], Content]]) -> dict[str, str]:
    """One display of several.

    Args:
        displays: The ranks and the message's content of each display that `fits_grid`.

    Returns:
        A MIME bundle.
    """
    cells, texts = [], []
    for ranks, content in displays:
        label = f"[{format_ranks(ranks)}]"
        cells.append(
            '<div style="max-width:100%;overflow:auto">'
            f'<div style="font-family:monospace;font-weight:bold">{label}</div>'
            f"{_html(content)}</div>"
        )
        texts.append(f"{label} {content['data'].get('text/plain', '')}")
    return {
        HTML: f'<div style="{GRID}">{"".join(cells)}</div>',
        "text/plain": "\n".join(texts),
    }


class Grid:
    """A grid that is displayed as it is, with lines of text below it."""

    def __init__(
        self, displays: Sequence[tuple[Sequence[int], Content]], notes: Sequence[str]
    ) -> None:
        """As `grid`."""
        self._bundle, self._notes = grid(displays), notes

    def __repr__(self) -> str:
        return "\n".join([self._bundle["text/plain"], *self._notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<div>{escape(each)}</div>" for each in self._notes)
        return self._bundle[HTML] + notes


def _html(content: Content) -> str:
    data = content["data"]
    for form in BINARY_IMAGES:
        if form in data:
            metadata = (content.get("metadata") or {}).get(form, {})
            return _image(form, "".join(data[form].split()), data, metadata)
    if HTML in data:
        return str(data[HTML])
    return _image(SVG, base64.b64encode(data[SVG].encode()).decode(), data, {})


def _image(form: str, encoded: str, data: Content, metadata: Content) -> str:
    """An image, of the size that the metadata gives."""
    size = "".join(
        f' {side}="{escape(str(metadata[side]))}"'
        for side in ("width", "height")
        if side in metadata
    )
    text = escape(data.get("text/plain", ""))
    return f'<img src="data:{form};base64,{encoded}" alt="{text}"{size}>'
