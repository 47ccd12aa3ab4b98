"""What a widget shows, as a text: for saved notebooks, and after the widget's end."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["WIDGET_VIEW", "text_of"]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
"""The media type of the display of a widget, which names its model."""

BAR_WIDTH = 10
TAG = re.compile(r"<[^>]*>")

State = Mapping[str, Any]


def text_of(state: State, state_of: Callable[[object], State | None]) -> str:
    """The text of a widget, and of the widgets in it.

    Args:
        state: The state of the widget, as in its messages.
        state_of: Looks up the state of a widget by a reference to it; None for another
            value, and for a widget that is closed.
    """
    children = state.get("children")
    if isinstance(children, list):
        inner = [each for each in map(state_of, children) if each is not None]
        return " ".join(filter(None, (text_of(each, state_of) for each in inner)))
    name = str(state.get("_model_name", "Widget")).removesuffix("Model")
    value = state.get("value")
    label = _plain(state.get("description"))
    if name in ("HTML", "HTMLMath", "Label"):
        return " ".join(filter(None, (label, _plain(value))))
    if name in ("FloatProgress", "IntProgress"):
        return " ".join(filter(None, (label, _bar(state))))
    if value is None:
        return label or name
    return f"{label or name}: {_plain(value)}"


def _plain(value: object) -> str:
    """A value without the tags of HTML and without the wide spaces of tqdm."""
    if value is None:
        return ""
    text = html.unescape(TAG.sub("", str(value)))
    return text.replace("\N{FIGURE SPACE}", " ").strip()


def _bar(state: State) -> str:
    low, high = state.get("min", 0.0), state.get("max", 100.0)
    done = (state.get("value", 0.0) - low) / (high - low) if high > low else 1.0
    filled = round(BAR_WIDTH * min(1.0, max(0.0, done)))
    return "█" * filled + "░" * (BAR_WIDTH - filled)
