"""Loads public names on their first use (PEP 562), and stores them.

A package's `__init__.py` names the module that defines each name, and imports the same
names under `TYPE_CHECKING`, for type checkers and editors::

    if TYPE_CHECKING:
        from nbdist.errors import UsageError as UsageError
    else:
        homes = {"nbdist.errors": ("UsageError",)}
        __getattr__, __dir__, __all__ = lazy.attach(__name__, homes)

`tests/test_exports.py` compares the two.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping

TYPE_CHECKING = False  # the parent of each rank does not import `typing`
if TYPE_CHECKING:
    from typing import Any, NoReturn

__all__ = ["attach", "refuse_rank_names"]

Homes = Mapping[str, Collection[str]]
"""Names by the module that defines them; the package's own name has submodules."""

_refusing = False
_stored: list[tuple[dict[str, Any], str]] = []
"""The rank-only names that were stored, each with the namespace it is stored in."""


def attach(
    package: str, homes: Homes, on_ranks: Homes | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package whose names load lazily.

    A name that was loaded is stored in the package, so that later uses are plain
    attribute accesses.

    Args:
        package: The package's `__name__`.
        homes: The names, by the module that defines them.
        on_ranks: Names that work on a rank only. After `refuse_rank_names`, each of
            them is a function that raises WrongProcess.
    """
    on_ranks = on_ranks or {}
    home_of = {
        name: home
        for table in (homes, on_ranks)
        for home, names in table.items()
        for name in names
    }
    rank_names = {name for names in on_ranks.values() for name in names}
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in rank_names and _refusing:
            return _Refusal(f"{package}.{name}")
        if home == package:
            found: Any = importlib.import_module(f"{package}.{name}")
        else:
            found = getattr(importlib.import_module(home), name)
        namespace[name] = found
        if name in rank_names:
            _stored.append((namespace, name))
        return found

    def names() -> list[str]:
        return sorted({*namespace, *home_of})

    return get, names, sorted(home_of)


def refuse_rank_names() -> None:
    """Make rank-only names raise WrongProcess. The notebook's process calls this."""
    global _refusing
    _refusing = True
    while _stored:
        namespace, name = _stored.pop()
        namespace.pop(name, None)


class _Refusal:
    """Replaces a rank-only function or module in the notebook."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = f"{name} runs on a rank: put it in a %%distributed cell."

    def __getattr__(self, name: str) -> _Refusal:
        if name.startswith("_"):
            raise AttributeError(f"{self._name} has no attribute {name!r} here")
        return _Refusal(f"{self._name}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        from nbdist.errors import WrongProcess

        raise WrongProcess(
            f"{self._name} runs on a rank: put it in a %%distributed cell"
        )
