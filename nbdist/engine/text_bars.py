"""Makes `tqdm.auto` and `tqdm.notebook` on a rank use tqdm's text bar.

`tqdm.auto` imports `tqdm.autonotebook`, which chooses a widget in every ipykernel. A
rank is an ipykernel, but not every front end of the notebook shows widgets: a bar would
stay at 0 %.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

__all__ = ["install"]

REPLACED = ("tqdm.autonotebook", "tqdm.notebook")


class _TextBars(MetaPathFinder, Loader):
    """Finds tqdm's modules of widgets as modules that hold its text bar."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in REPLACED else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm.std import tqdm, trange

        names: dict[str, Any] = {"tqdm": tqdm, "trange": trange}
        if module.__name__ == "tqdm.notebook":
            names = _notebook_names(tqdm)
        vars(module).update(names, __all__=[*names])


def _notebook_names(bar: type[Any]) -> dict[str, Any]:
    """The names of `tqdm.notebook`, over the text bar."""

    class tqdm_notebook(bar):  # type: ignore[misc]
        """The text bar, with the keyword of the widget."""

        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:
            if not display:
                options["file"] = io.StringIO()
            super().__init__(*args, **options)

    def tnrange(*args: Any, **options: Any) -> Any:
        return tqdm_notebook(range(*args), **options)

    return {
        "tqdm_notebook": tqdm_notebook,
        "tnrange": tnrange,
        "tqdm": tqdm_notebook,
        "trange": tnrange,
    }


def install() -> None:
    """Let the next import of these modules choose the text bar. May be called twice."""
    if not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())
