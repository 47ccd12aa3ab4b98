"""What holds a rank's memory: the storages of its live tensors, by the names of cells.

Several tensors may share one storage, as views do. A storage counts once. Tensors that
only C++ holds, such as those that autograd has saved for backward, are not seen.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nbdist.collectives import Group, registry
from nbdist.collectives.sync.cuda_peers import is_mapped
from nbdist.engine import cells
from nbdist.engine.rank import this_rank
from nbdist.engine.user_variables import user_variables
from nbdist.ipc.own_memory import has_memory
from nbdist.ipc.stacks import Frame, from_user_code, is_own_file
from nbdist.ipc.thread_frames import take_locals
from nbdist.training.leaves import Deadline, TooSlow
from nbdist.wire import HeldTensor

__all__ = ["HeldTensors", "live_tensors"]

ATOMS = (str, bytes, int, float, complex, type, ModuleType, FunctionType)
"""Types whose objects hold no tensors, or none of the user's."""
SEQUENCES = (list, tuple, set, frozenset, deque)
MODULE_PARTS = ("_parameters", "_buffers", "_modules")
"""The attributes of a module whose entries are its attributes too."""
CHECK_EVERY = 1000
"""Objects between two looks at the deadline."""

Named = tuple[str, object]


class HeldTensors:
    """The storages of this rank's tensors.

    Args:
        deadline: When to stop looking for names.
    """

    def __init__(self, deadline: Deadline) -> None:
        self.totals: Counter[str] = Counter()
        """Bytes of all storages, by device."""
        self.counts: Counter[str] = Counter()
        """The number of storages, by device."""
        self.note = ""
        """Why some tensors may have no name."""
        self._held: dict[int, HeldTensor] = {}
        """By the storage's address."""
        try:
            for name, tensor in _Search(deadline).tensors():
                self._add(name, tensor)
        except TooSlow as error:
            self.note = f"some names are missing: to find them takes too long ({error})"
        for each in gc.get_objects():
            if issubclass(type(each), Tensor):
                self._add("", each)

    def largest(self, count: int) -> list[HeldTensor]:
        """The largest storages, the largest first."""
        ordered = sorted(self._held.values(), key=lambda held: -held.size)
        return ordered[:count]

    def _add(self, name: str, tensor: Tensor) -> None:
        if not has_memory(type(tensor)):  # its parts are tensors too
            return
        try:
            storage = Tensor.untyped_storage(tensor)
            key, size, device = storage._cdata, storage.nbytes(), str(storage.device)
            shape = (-1,) if tensor.is_nested else tuple(tensor.shape)
        except (NotImplementedError, RuntimeError):  # sparse or opaque
            return
        if not size or device == "meta" or is_mapped(storage):
            return
        before = self._held.get(key)
        if before is None:
            self.totals[device] += size
            self.counts[device] += 1
        elif not name or math.prod(before.shape) >= math.prod(shape):
            return  # of several tensors, the largest describes the storage
        self._held[key] = HeldTensor(
            name,
            type(tensor).__name__,
            shape,
            str(tensor.dtype).removeprefix("torch."),
            device,
            size,
        )


def live_tensors(limit_s: float) -> HeldTensors:
    """The storages of all tensors of this process. Nothing is kept alive or moved.

    Args:
        limit_s: Seconds for the search for names.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return HeldTensors(Deadline(limit_s))


class _Search:
    """Finds the tensors that a name leads to, each once and by its shortest name.

    It calls no method of the user's classes, other than those of a tensor or optimizer
    that its class has replaced. An object that is not as it should be is passed over.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._seen: set[int] = set()
        self._parameters: dict[int, str] = {}
        """The name of each parameter, by id."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Raises TooSlow after the deadline."""
        variables = list(user_variables().items())
        modules = [each for each in variables if issubclass(type(each[1]), nn.Module)]
        # The modules first: an optimizer then knows its parameters' names.
        for roots in (modules, variables, _local_variables(), _kept_by_ipython()):
            yield from self._below(roots, (*ATOMS, dist.ProcessGroup, Group))
        for _, tensor in self._below((("", group) for group in registry.live), ATOMS):
            yield "nbdist's own buffer", tensor

    def _below(
        self, roots: Iterable[Named], skipped: tuple[type, ...]
    ) -> Iterator[tuple[str, Tensor]]:
        waiting = deque(roots)
        for number in itertools.count():
            if not waiting:
                return
            if number % CHECK_EVERY == 0:
                self._deadline.check()
            name, value = waiting.popleft()
            # The type, because `isinstance` asks the value for its class.
            kind = type(value)
            if id(value) in self._seen or value is None or issubclass(kind, skipped):
                continue
            self._seen.add(id(value))
            if issubclass(kind, Tensor):
                tensor = cast(Tensor, value)
                self._parameters[id(value)] = name
                yield name, tensor
            try:
                waiting.extend(self._parts_of(name, value))
            except Exception:  # noqa: BLE001 - any object may be looked at
                continue

    def _parts_of(self, name: str, value: object) -> list[Named]:
        if issubclass(type(value), Tensor):
            return list(_parts_of_tensor(name, cast(Tensor, value)))
        if issubclass(type(value), torch.optim.Optimizer):
            return list(self._parts_of_optimizer(name, value))
        return list(_parts(name, value))

    def _parts_of_optimizer(self, name: str, optimizer: Any) -> Iterator[Named]:
        """The parameters, and the state of each."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            own = f"{name}.param_groups parameter {index}"
            yield own, parameter
            label = self._parameters.get(id(parameter), f"parameter {index}")
            for key, each in list(optimizer.state.get(parameter, {}).items()):
                yield f"{name}.state[{label}][{_key_text(key)}]", each


def _local_variables() -> Iterator[Named]:
    """Variables of functions that run, and of those in which the last cell failed."""
    rank = this_rank()
    if rank.activity is not None:
        yield from _locals_of(rank.frames()[::-1], "")
    error = cells.last_error()
    if error is not None:
        frames = _frames_in(error.__traceback__)
        yield from _locals_of(frames, " of the last error's traceback")


def _locals_of(frames: list[FrameType], what: str) -> Iterator[Named]:
    described = [
        Frame(each.f_code.co_filename, each.f_lineno, each.f_code.co_name)
        for each in frames
    ]
    theirs = len(from_user_code(described))
    for frame in frames[len(frames) - theirs :]:
        if is_own_file(frame.f_code.co_filename):
            continue
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function's
            for name, value in take_locals(frame).items():
                yield f"{frame.f_code.co_name}(): {name}{what}", value


def _frames_in(trace: TracebackType | None) -> list[FrameType]:
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _kept_by_ipython() -> Iterator[Named]:
    """The results of earlier cells, `Out[5]` and `_`."""
    shell = this_rank().shell
    for number, value in dict(shell.user_ns.get("_oh", {})).items():
        yield f"Out[{number}]", value
    for name in ("_", "__", "___"):
        yield name, shell.user_ns.get(name)


def _parts_of_tensor(name: str, tensor: Tensor) -> Iterator[Named]:
    if tensor.is_leaf and tensor.grad is not None:
        yield f"{name}.grad", tensor.grad
    if is_traceable_wrapper_subclass(tensor):
        yield name, getattr(tensor, "_local_tensor", None)


def _parts(name: str, value: Any) -> Iterator[Named]:
    """The values that a container or an object holds, with their names."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, each in list(dict.items(value)):
            yield f"{name}[{_key_text(key)}]", each
    for sequence in SEQUENCES:
        if issubclass(kind, sequence):
            for index, each in enumerate(list(sequence.__iter__(value))):
                yield f"{name}[{index}]", each
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return
    for key, each in list(attributes.items()):
        if type(key) is not str:
            continue
        if issubclass(kind, nn.Module) and key in MODULE_PARTS:
            for part, held in list(each.items()):
                yield f"{name}.{part}", held
        else:
            yield f"{name}.{key}", each


def _key_text(key: object) -> str:
    if type(key) in (str, float) or (type(key) is int and abs(key) < 2**63):
        return repr(key)
    return type(key).__name__
