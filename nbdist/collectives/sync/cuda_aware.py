"""Whether MPI accepts addresses in device memory.

The MPI library reports it. A trial would crash with a library that does not.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpi4py import MPI

__all__ = ["ask", "takes_device_memory"]

_LIBRARY = re.compile(r"/\S*/lib(?:mpi|mpich|pmpi)[^/\s]*\.(?:so|dylib)[^/\s]*$")
_CUDA = 0
"""MPIX_GPU_SUPPORT_CUDA."""
_MVAPICH_SWITCHES = ("MV2_USE_CUDA", "MVP_USE_CUDA")
"""MVAPICH reports whether it was built with CUDA. One of these variables enables it."""


@functools.cache
def takes_device_memory() -> bool:
    """Whether this process's MPI accepts addresses in device memory.

    MPI must be initialised.
    """
    if MPI.get_vendor()[0].startswith("MVAPICH"):
        values = [os.environ.get(name) for name in _MVAPICH_SWITCHES]
        if "1" not in values:
            return False
    return any(map(ask, _loaded_libraries()))


def ask(library: Any) -> bool:
    """Whether a library is an MPI that accepts addresses in device memory.

    Args:
        library: a `ctypes.CDLL`.
    """
    # MPICH's function comes first: its MPIX_Query_cuda_support aborts debug builds.
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is not None:
        supported = ctypes.c_int(0)
        return query(_CUDA, ctypes.byref(supported)) == 0 and bool(supported.value)
    # Open MPI reports whether it has found CUDA at run time.
    query = getattr(library, "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def _loaded_libraries() -> Iterator[ctypes.CDLL]:
    """The loaded MPI libraries, found in the process's memory map.

    mpi4py may load MPI with local symbols, which `ctypes.CDLL(None)` does not find.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {found[0] for line in lines if (found := _LIBRARY.search(line))}
    for path in sorted(paths):
        yield ctypes.CDLL(path)
