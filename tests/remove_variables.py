"""Removes the variables of cells on a rank. Ranks import it; it imports no tests."""

from __future__ import annotations


def remove_variables() -> None:
    """Remove the variables that cells have made on this rank."""
    from IPython import get_ipython

    shell = get_ipython()
    for name in set(shell.user_ns) - set(shell.user_ns_hidden):
        if not name.startswith("_"):
            del shell.user_ns[name]
