"""Pickles values, with the data of arrays and tensors outside the pickle stream.

Tensors and arrays whose memory overlaps share it in the receiving process too, also
those of several named values. This module imports torch only in a process that receives
a tensor. cloudpickle pickles functions and classes of `__main__` by value.
"""

from __future__ import annotations

import io
import linecache
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any, cast

import cloudpickle

from nbdist.ipc import keras_objects
from nbdist.ipc.memory_regions import ReceivedRegions, Regions
from nbdist.ipc.own_memory import check_array, check_buffer, check_values
from nbdist.ipc.stacks import cell_name, cell_of

__all__ = [
    "PLAIN",
    "CodePickler",
    "Each",
    "dumps",
    "dumps_named",
    "dumps_whole",
    "loads",
    "loads_named",
]

Each = Callable[[str], AbstractContextManager[None]]
"""Returns the context in which the value of this name is pickled or unpickled."""


def _unchanged(_name: str) -> AbstractContextManager[None]:
    return nullcontext()


PLAIN = {bool, bytes, float, int, str, type(None)}
"""Types whose values `pickle` alone can pickle."""


_received = threading.local()
"""`regions`: those of the value that this thread unpickles."""


class _Namespace(dict[str, Any]):
    """Replaces the globals of a rank's cells in the pickle of a cell's function."""


def dumps(value: object, namespace: object = None) -> list[Any]:
    """Pickle a value into a stream and the raw buffers to which the stream refers.

    The buffers are not copied.

    Args:
        value: The value.
        namespace: The globals of this rank's cells, for a copy to another rank.
            Functions with these globals get those of the other rank's cells, as if they
            had been defined there. This rank's GPU becomes the other rank's.

    Raises:
        BaseException: The error of the value's own pickling, usually TypeError or
            PicklingError.
    """
    if _is_plain(value):
        return [pickle.dumps(value, 5)]
    buffers: list[Any] = []
    stream = io.BytesIO()
    pickler = _pickler(stream, buffers, namespace)
    pickler.dump(value)
    # A view would keep the stream open, and Python 3.13 complains of that when the
    # garbage collector finds both.
    return [stream.getvalue(), *buffers, *pickler.regions.frames(len(buffers))]


def _is_plain(value: object) -> bool:
    """Whether `pickle` alone can pickle a value. It takes a tenth of the time."""
    values = [value]
    while values:
        each = values.pop()
        kind = type(each)
        if kind is tuple:
            values.extend(cast(tuple[object, ...], each))
        elif kind not in PLAIN and not (kind is dict and not each):
            return False
    return True


def loads(frames: list[Any], *, on_host: bool = False) -> Any:
    """The value that `dumps` pickled. Its arrays are writable if the buffers are.

    Args:
        frames: The frames of `dumps`.
        on_host: Put tensors of GPUs into host memory, and leave CUDA alone. Otherwise
            they are put on this rank's GPU.
    """
    stream, *buffers = frames
    with _receiving(buffers, on_host):
        return pickle.loads(stream, buffers=buffers)


@contextmanager
def _receiving(buffers: list[Any], on_host: bool = False) -> Iterator[None]:
    before = getattr(_received, "regions", None)
    _received.regions = ReceivedRegions(buffers, on_host)
    try:
        yield
    finally:
        _received.regions = before


def dumps_whole(value: object) -> bytes:
    """Pickle a value into one stream for `pickle.loads`, with its data copied into it.

    Raises:
        BaseException: As `dumps`.
    """
    stream = io.BytesIO()
    CodePickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def dumps_named(
    values: Mapping[str, Any], namespace: object = None, each: Each = _unchanged
) -> list[Any]:
    """Pickle named values one after another, as frames for `loads_named`.

    An object to which several values refer is pickled once, so that an optimizer still
    refers to its model's parameters. `namespace` is as for `dumps`.
    """
    buffers: list[Any] = []
    stream = io.BytesIO()
    pickler = _pickler(stream, buffers, namespace)
    for name, value in values.items():
        with each(name):
            pickler.dump(value)
    names = pickle.dumps(list(values))
    regions = pickler.regions.frames(len(buffers))
    return [names, stream.getvalue(), *buffers, *regions]


def loads_named(frames: list[Any], each: Each = _unchanged) -> dict[str, Any]:
    """The values that `dumps_named` pickled, by name."""
    names, stream, *buffers = frames
    unpickler = pickle.Unpickler(io.BytesIO(stream), buffers=buffers)
    values = {}
    with _receiving(buffers):
        for name in pickle.loads(names):
            with each(name):
                values[name] = unpickler.load()
    return values


def _pickler(stream: io.BytesIO, buffers: list[Any], namespace: object) -> _Pickler:
    def keep(buffer: pickle.PickleBuffer) -> None:
        octets = buffer.raw()
        check_buffer(octets)
        buffers.append(octets)

    pickler = _Pickler(stream, protocol=5, buffer_callback=keep)
    pickler.regions = Regions()
    if namespace is not None:
        pickler.globals_ref[id(namespace)] = _Namespace()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            pickler.own_gpu = torch.device("cuda", torch.cuda.current_device())
    return pickler


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles code with the name of its file, which errors and the debugger show.

    cloudpickle 3.1.3 replaces the name by "<dynamic-code>". The code of a cell has the
    number of the cell, and its lines.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is CodeType:
            reduced = self.dispatch_table[CodeType](obj)
            return _rebuild_code, (*reduced, *_source_of(obj.co_filename))
        return super().reducer_override(obj)


def _source_of(path: str) -> tuple[str, list[str] | None]:
    """The name of a code's file in the receiving process, and its lines if it is none.

    The lines are the same object for all code of a cell, so that they are pickled once.
    """
    cached = linecache.cache.get(path, ())
    if len(cached) != 4 or cached[1] is not None:  # it has a time: it is a file
        return path, None
    ipython = sys.modules.get("IPython.core.getipython")
    shell = ipython and ipython.get_ipython()
    label = shell and shell.compile.format_code_name(path)
    if label and label[0] == "Cell" and cell_of(path) is None:
        path = cell_name(int(label[1].strip("In[]")), Path(path).stem)
    return path, cached[2]


def _rebuild_code(
    make: Callable[..., CodeType],
    arguments: tuple[Any, ...],
    path: str,
    lines: list[str] | None,
) -> CodeType:
    if lines is not None:
        size = sum(map(len, lines))
        linecache.cache.setdefault(path, (size, None, lines, path))
    return make(*arguments).replace(co_filename=path)


class _Pickler(CodePickler):
    regions: Regions
    """The memory of the tensors and arrays that were pickled."""
    own_gpu: Any = None
    """The `torch.device` that becomes the receiving rank's; None if none does."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _Namespace:
            return _cells_namespace, ()
        if self.own_gpu is not None and type(obj) is type(self.own_gpu):
            return (_current_gpu, ()) if obj == self.own_gpu else NotImplemented
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if numpy is not None and issubclass(type(obj), numpy.ndarray):
            check_array(obj)
        if torch is not None and issubclass(type(obj), torch.Tensor):
            check_values(obj)
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter):
            reduced = _reduce_tensor(obj, torch, self.regions)
            if reduced is not None:
                return reduced
        if numpy is not None and type(obj) is numpy.ndarray:
            reduced = _reduce_array(obj, self.regions)
            if reduced is not None:
                return reduced
        reduced = keras_objects.reduce(obj)
        return super().reducer_override(obj) if reduced is None else reduced


def _cells_namespace() -> Any:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None  # a rank has a shell
    return shell.user_global_ns


def _current_gpu() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def _reduce_tensor(tensor: Any, torch: Any, regions: Regions) -> Any:
    """(rebuild, arguments) with the data in a region; None leaves it to torch.

    torch pickles sparse, nested, quantised and meta tensors, which have no plain bytes.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    if tensor.is_nested:
        return None
    if tensor.is_cuda:
        regions.settle(tensor.device)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain._is_zerotensor():
        plain = plain.clone()
    if plain.device.type not in ("cpu", "cuda"):
        plain = plain.cpu()
    return _rebuild_tensor, (
        regions.add_tensor(plain) if plain.numel() else None,
        str(plain.dtype).removeprefix("torch."),
        tuple(plain.shape),
        plain.stride(),
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
        tensor.device.type != "cpu",
    )


def _rebuild_tensor(
    number: int | None,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    on_device: bool,
) -> Any:
    import torch

    kind = getattr(torch, dtype)
    on_host = _received.regions.on_host
    on_gpu = on_device and not on_host and torch.cuda.is_available()
    if number is None:
        device = "cuda" if on_gpu else "cpu"
        tensor = torch.empty_strided(shape, stride, dtype=kind, device=device)
    else:
        region, offset, is_packed = _received.regions.find(number)
        storage = region.storage(on_gpu)
        tensor = torch.empty(0, dtype=kind, device=storage.device)
        at = offset // kind.itemsize
        layout = (shape,) if is_packed else (shape, stride)
        tensor.set_(storage, at, *layout)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _reduce_array(array: Any, regions: Regions) -> Any:
    """(rebuild, arguments) with the data in a region; None leaves it to numpy.

    numpy pickles arrays of objects, and empty ones.
    """
    if array.dtype.hasobject or not array.nbytes:
        return None
    number = regions.add_array(array)
    return _rebuild_array, (number, array.dtype, array.shape, array.strides)


def _rebuild_array(
    number: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Any:
    import numpy as np

    region, offset, is_packed = _received.regions.find(number)
    layout = None if is_packed else strides
    return np.ndarray(shape, dtype, region.octets, offset, layout)
