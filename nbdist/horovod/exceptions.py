"""The names of Horovod's exceptions, for scripts that catch them."""

from __future__ import annotations

from nbdist.errors import CollectiveError
from nbdist.training.elastic.state import SizeChange

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

HorovodInternalError = CollectiveError
"""A collective has failed, for instance because a rank died."""
HostsUpdatedInterrupt = SizeChange
"""An elastic run changes its number of ranks at this commit. It is a BaseException."""
