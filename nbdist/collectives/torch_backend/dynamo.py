"""Keeps torch.compile out of nbdist's own code.

A compiled function calls collectives between its graphs. Dynamo would otherwise trace
into a process group's methods, which it cannot.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["skip_in_dynamo"]

_RULES = "torch._dynamo.trace_rules"
_PACKAGE = __name__.partition(".")[0]


def skip_in_dynamo() -> None:
    """Add this package to those that Dynamo skips, now or when it is imported.

    Importing Dynamo takes seconds, so it is left to the first `torch.compile`. Safe to
    call twice.
    """
    if _RULES in sys.modules:
        _add_package(sys.modules[_RULES])
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _add_package(rules: ModuleType) -> None:
    folder = ModuleType.__getattribute__(sys.modules[_PACKAGE], "__path__")[0]
    try:
        if not any(each.startswith(folder) for each in rules.SKIP_DIRS):
            rules.add(_PACKAGE)
    except Exception as error:  # noqa: BLE001 - other releases of torch have other rules
        # An error here would leave torch._dynamo half imported for good.
        warnings.warn(
            f"torch.compile may trace into nbdist, because torch._dynamo takes no "
            f"package to skip ({type(error).__name__}: {error})",
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Finds Dynamo's rules once, with a loader that adds the package to them."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != _RULES:
            return None
        if self in sys.meta_path:  # another thread may have imported it
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _add_package(module)
