"""A button that interrupts a cell in the background."""

from __future__ import annotations

from collections.abc import Callable

from IPython.display import display, update_display

from nbdist.widgets.live_text import shows_widgets

__all__ = ["StopButton"]

EMPTY = {"text/plain": "", "text/html": ""}


class StopButton:
    """A button in the output of the running cell, if the front end shows widgets.

    Args:
        identifier: A unique name.
        what: What the button interrupts.
        stop: Called when the button is pressed, in the kernel's main thread.
    """

    def __init__(self, identifier: str, what: str, stop: Callable[[], None]) -> None:
        self._identifier = identifier
        self._button = None
        if not shows_widgets():
            return
        import ipywidgets

        self._button = ipywidgets.Button(
            description=f"interrupt {what}",
            icon="stop",
            layout=ipywidgets.Layout(width="max-content"),
        )
        self._button.on_click(lambda _: stop())
        bundle = self._button._repr_mimebundle_()
        bundle["text/plain"] = f"{what} in the background"  # of a collapsed output
        display(bundle, raw=True, display_id=identifier)

    def close(self) -> None:
        """Remove the button. Call it in the context of the notebook's cell."""
        if self._button is not None:
            update_display(EMPTY, raw=True, display_id=self._identifier)
            self._button.close()
