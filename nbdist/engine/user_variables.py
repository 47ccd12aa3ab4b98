"""Which names of the cells' namespace are the user's variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdist.engine.rank import this_rank

__all__ = ["user_variables"]


def user_variables(namespace: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The variables that the user has made, by name.

    Names that begin with an underscore and those of every cell, such as `rank`, are not
    among them. Any thread may call.

    Args:
        namespace: Where they are. Default: the cells' own.
    """
    shell = this_rank().shell
    names = dict(shell.user_ns if namespace is None else namespace)
    return {
        name: value
        for name, value in names.items()
        if type(name) is str
        and not name.startswith("_")
        and name not in shell.user_ns_hidden
    }
