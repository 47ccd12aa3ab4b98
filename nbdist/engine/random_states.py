"""Keeps the process's random numbers where they were, while a value is looked at."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nbdist.engine.rank import this_rank

__all__ = ["unmoved"]


@contextmanager
def unmoved() -> Iterator[None]:
    """Restore the random states of Python, numpy, and torch on the CPU at the end.

    In another thread than the main one, they are restored only while no cell runs,
    because a cell draws from them too.
    """
    rank = this_rank()
    is_main = threading.get_ident() == rank.main_thread
    if not is_main and rank.activity is not None:
        yield
        return
    request, before = rank.request, _states()

    def restore() -> None:
        if is_main or (rank.activity is None and rank.request == request):
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    try:
        yield
    finally:
        if _texts(before) != _texts(_states()):
            # Between two cells, no cell can begin while the main thread restores them.
            restore() if is_main else rank.shell.kernel.io_loop.add_callback(restore)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _texts(states: tuple[Any, Any, torch.Tensor]) -> tuple[object, ...]:
    python, (_, key, *rest), torch_state = states
    return python, key.tobytes(), rest, torch_state.numpy().tobytes()
