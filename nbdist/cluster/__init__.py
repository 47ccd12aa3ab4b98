"""Starts, uses and stops the ranks of a cluster, from the notebook's process.

The package itself can be called: `nbdist.cluster()` is the notebook's running cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

TYPE_CHECKING = False  # the process supervisor does not import `typing`
if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster

__all__ = ["name_running"]

_running: Callable[[], Cluster] | None = None


def name_running(running: Callable[[], Cluster]) -> None:
    """Set the function whose result `nbdist.cluster()` returns."""
    global _running
    _running = running


class _CallablePackage(ModuleType):
    """A module that can be called."""

    def __call__(self) -> Cluster:
        """The cluster that `%dist_start` has started in this notebook.

        Raises:
            NotRunning: No cluster is running, or this is no notebook.
        """
        from nbdist.errors import NotRunning

        if _running is None:
            raise NotRunning(
                "nbdist.cluster() is the cluster of a notebook, and the extension is "
                "not loaded: %load_ext nbdist, then %dist_start; in a script, use "
                "nbdist.Cluster"
            )
        return _running()


sys.modules[__name__].__class__ = _CallablePackage
