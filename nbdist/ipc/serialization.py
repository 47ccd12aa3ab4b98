"""Pickles values, with the data of arrays and tensors outside the pickle stream.

This module imports torch only in a process that receives a tensor. cloudpickle pickles
functions and classes of `__main__` by value.
"""

from __future__ import annotations

import io
import linecache
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any, cast

import cloudpickle

from nbdist.ipc import keras_objects
from nbdist.ipc.stacks import cell_name, cell_of

__all__ = [
    "PLAIN",
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
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    _pickler(stream, buffers, namespace).dump(value)
    # A view would keep the stream open, and Python 3.13 complains of that when the
    # garbage collector finds both.
    return [stream.getvalue(), *buffers]


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


def loads(frames: list[Any]) -> Any:
    """The value that `dumps` pickled. Its arrays are writable if the buffers are."""
    return pickle.loads(frames[0], buffers=frames[1:])


def dumps_whole(value: object) -> bytes:
    """Pickle a value into one stream for `pickle.loads`, with its data copied into it.

    Raises:
        BaseException: As `dumps`.
    """
    stream = io.BytesIO()
    _CodePickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def dumps_named(
    values: Mapping[str, Any], namespace: object = None, each: Each = _unchanged
) -> list[Any]:
    """Pickle named values one after another, as frames for `loads_named`.

    An object to which several values refer is pickled once, so that an optimizer still
    refers to its model's parameters. `namespace` is as for `dumps`.
    """
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    pickler = _pickler(stream, buffers, namespace)
    for name, value in values.items():
        with each(name):
            pickler.dump(value)
    names = pickle.dumps(list(values))
    return [names, stream.getvalue(), *buffers]


def loads_named(frames: list[Any], each: Each = _unchanged) -> dict[str, Any]:
    """The values that `dumps_named` pickled, by name."""
    names, stream, *buffers = frames
    unpickler = pickle.Unpickler(io.BytesIO(stream), buffers=buffers)
    values = {}
    for name in pickle.loads(names):
        with each(name):
            values[name] = unpickler.load()
    return values


def _pickler(
    stream: io.BytesIO, buffers: list[memoryview], namespace: object
) -> _Pickler:
    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(buffer.raw())

    pickler = _Pickler(stream, protocol=5, buffer_callback=keep)
    if namespace is not None:
        pickler.globals_ref[id(namespace)] = _Namespace()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            pickler.own_gpu = torch.device("cuda", torch.cuda.current_device())
    return pickler


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
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
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
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


class _Pickler(_CodePickler):
    own_gpu: Any = None
    """The `torch.device` that becomes the receiving rank's; None if none does."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _Namespace:
            return _cells_namespace, ()
        if self.own_gpu is not None and type(obj) is type(self.own_gpu):
            return (_current_gpu, ()) if obj == self.own_gpu else NotImplemented
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter):
            reduced = _reduce_tensor(obj, torch)
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


def _reduce_tensor(tensor: Any, torch: Any) -> Any:
    """(rebuild, arguments) with the data as a buffer; None leaves it to torch.

    torch pickles sparse, nested, quantised and meta tensors, which have no plain bytes.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    if tensor.is_nested:
        return None
    on_device = tensor.device.type != "cpu"
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A tensor of one element counts as contiguous whatever its stride is.
    flat = plain.as_strided((plain.numel(),), (1,))
    octets = flat.view(torch.uint8).numpy()
    dtype = str(plain.dtype).removeprefix("torch.")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return _rebuild_tensor, (
        pickle.PickleBuffer(octets),
        dtype,
        tuple(plain.shape),
        tensor.requires_grad,
        is_parameter,
        on_device,
    )


def _rebuild_tensor(
    octets: Any,
    dtype: str,
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    on_device: bool,
) -> Any:
    import torch

    if memoryview(octets).readonly:
        octets = bytearray(octets)
    kind = getattr(torch, dtype)
    if memoryview(octets).nbytes:
        tensor = torch.frombuffer(octets, dtype=torch.uint8).view(kind).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=kind, device="cpu")
    if on_device and torch.cuda.is_available():
        tensor = tensor.cuda()
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
