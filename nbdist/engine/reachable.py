"""Whether everything that a value's text may read can be read.

A value's `__repr__` is the user's code, and reads memory without a check.
"""

from __future__ import annotations

import gc
import itertools
from collections import deque
from types import CodeType, FrameType, FunctionType, ModuleType

import numpy as np
import torch
from torch import Tensor

from nbdist.ipc.own_memory import check_array, check_values
from nbdist.training.leaves import Deadline

__all__ = ["check_reachable"]

ATOMS = (type, ModuleType, CodeType, FrameType, str, bytes, int, float, complex)
"""Types whose objects lead to no values, or to all of the program's."""


def check_reachable(value: object, most: int, deadline: Deadline) -> None:
    """Check the memory of the tensors and arrays that a value leads to.

    No code of the user's runs. The objects nearest to the value come first.

    Args:
        value: Any object.
        most: The most objects to look at.
        deadline: When to give up.

    Raises:
        Unreadable: Memory cannot be read.
        TooSlow: The deadline has passed.
    """
    with torch._C.DisableTorchFunctionSubclass():
        _search(value, most, deadline)


def _search(value: object, most: int, deadline: Deadline) -> None:
    waiting, seen = deque([value]), {id(value)}
    for number in itertools.count():
        if not waiting or number >= most:
            return
        if number % 100 == 0:
            deadline.check()
        each = waiting.popleft()
        kind = type(each)
        if isinstance_of(each, Tensor):
            check_values(each)
        elif isinstance_of(each, np.ndarray):
            check_array(each)
        held: list[object]
        if issubclass(kind, FunctionType):  # its globals are not the value's
            held = [*(each.__closure__ or ())]  # type: ignore[attr-defined]
        else:
            held = gc.get_referents(each)
        for part in itertools.islice(held, most):
            if not issubclass(type(part), ATOMS) and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def isinstance_of(value: object, kind: type) -> bool:
    """As `isinstance`, which may run the value's own code."""
    return issubclass(type(value), kind)
