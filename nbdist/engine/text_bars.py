"""Makes `tqdm.auto` on a rank use tqdm's text bar.

`tqdm.auto` imports `tqdm.autonotebook`, which chooses a widget in every ipykernel. A
rank is an ipykernel, but its widgets do not reach the notebook: a bar would stay at
0 %.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

__all__ = ["install"]

REPLACED = "tqdm.autonotebook"


class _TextBars(MetaPathFinder, Loader):
    """Finds `tqdm.autonotebook` as a module that holds tqdm's text bar."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname == REPLACED else None

    def exec_module(self, module: ModuleType) -> None:
        from tqdm.std import tqdm, trange

        vars(module).update(tqdm=tqdm, trange=trange, __all__=["tqdm", "trange"])


def install() -> None:
    """Let the next import of `tqdm.auto` choose the text bar. May be called twice."""
    if not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())
