"""Functions that describe the inherited state of a process. They run on ranks."""

from __future__ import annotations

from typing import Any

__all__ = [
    "open_files",
    "random_states",
    "seeded_draws",
    "state",
    "threads_of_pools",
]


def state() -> dict[str, Any]:
    """The inherited state that must be equal on two ranks of one program."""
    import asyncio
    import atexit
    import faulthandler
    import gc
    import logging
    import multiprocessing
    import os
    import resource
    import signal
    import sys
    import threading
    import warnings

    import numpy as np
    import torch
    import zmq

    mask = os.umask(0)
    os.umask(mask)
    with open("/proc/self/maps", encoding="utf-8") as lines:
        maps = lines.read()
    of_a_start = ("NBDIST_", "PMIX_", "OMPI_", "PRTE_", "MASTER_PORT")
    return {
        "signal handlers": [
            repr(signal.getsignal(number)).partition(" at 0x")[0]
            for number in sorted(signal.valid_signals())
        ],
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "working folder": os.getcwd(),
        "umask": mask,
        "arguments": sys.argv[1:],
        "module path": sys.path,
        "environment": {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(of_a_start)
        },
        "names of other variables": sorted(
            name for name in os.environ if name.startswith(of_a_start)
        ),
        "standard input": os.readlink("/proc/self/fd/0"),
        "text streams": [
            (stream.encoding, stream.errors, stream.line_buffering, stream.fileno())
            for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__)
            if stream is not None
        ],
        "atexit handlers": atexit._ncallbacks(),  # type: ignore[attr-defined]
        "event loop policy": type(asyncio.get_event_loop_policy()).__name__,
        "zmq contexts": sum(isinstance(each, zmq.Context) for each in gc.get_objects()),
        "log handlers": {
            name: [type(handler).__name__ for handler in logger.handlers]
            for name, logger in [
                ("root", logging.getLogger()),
                *logging.Logger.manager.loggerDict.items(),
            ]
            if isinstance(logger, logging.Logger) and logger.handlers
        },
        "faulthandler": faulthandler.is_enabled(),
        "limits": [
            resource.getrlimit(getattr(resource, name))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        ],
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "warning filters": [str(each) for each in warnings.filters],
        "interpreter flags": str(sys.flags),
        "hash": hash("nbdist"),
        "torch's threads": torch.get_num_threads(),
        "numpy's error state": np.geterr(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "main module": sys.modules["__main__"].__name__,
        "collector": (gc.isenabled(), gc.get_threshold()),
        "CUDA": (
            torch.cuda.is_initialized(),
            [name for name in ("libcuda.so", "libnvidia-ml") if name in maps],
        ),
    }


def open_files() -> dict[int, str]:
    """The target of each descriptor of this process."""
    import os

    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing
            continue
    return found


def random_states() -> tuple[object, ...]:
    """A number from each unseeded random generator."""
    import multiprocessing
    import random

    import numpy as np
    import torch

    return (
        random.random(),
        np.random.random(),
        torch.rand(1).item(),
        bytes(multiprocessing.current_process().authkey).hex(),
    )


def seeded_draws() -> tuple[object, ...]:
    """A number from each seeded random generator."""
    import random

    import numpy as np
    import torch

    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    return random.random(), np.random.random(), torch.rand(1).item()


def threads_of_pools() -> tuple[int, int, int, list[int]]:
    """Threads of torch, here and in a new thread, of OpenMP and of OpenBLAS."""
    import threading

    import threadpoolctl
    import torch

    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    pools = threadpoolctl.threadpool_info()
    return (
        torch.get_num_threads(),
        seen[0],
        max(p["num_threads"] for p in pools if p["user_api"] == "openmp"),
        [p["num_threads"] for p in pools if p["user_api"] == "blas"],
    )
