"""A rank as if no cell had run. Ranks import this file, so it imports no tests."""

from __future__ import annotations


def forget() -> None:
    """On a rank: remove the variables that cells have made."""
    from IPython import get_ipython

    shell = get_ipython()
    for name in set(shell.user_ns) - set(shell.user_ns_hidden):
        if not name.startswith("_"):
            del shell.user_ns[name]
