"""Takes a value apart into leaves, so that it can be compared between ranks.

A leaf is a tensor, an array or a few bytes, with a name such as
`model.layers.3.weight`. Two values are equal, bit for bit, if their leaves have equal
names, forms and contents. A leaf without content cannot be compared, and says why.
"""

from __future__ import annotations

import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim.lr_scheduler import LRScheduler

from nbdist.errors import message_of
from nbdist.ipc.own_memory import check_array, check_tensor, has_memory

__all__ = [
    "Content",
    "Deadline",
    "Leaf",
    "TooSlow",
    "is_dataframe",
    "leaves_of",
    "name_of_kind",
]

Content = Tensor | np.ndarray[Any, Any] | bytes

EXACT_TEXT = {bool, int, str, bytes, bytearray, type(None), type(...), range}
EXACT_TEXT |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Types whose `repr` is different for different values."""
RANKS_OWN = {"rank", "local_rank", "device"}
"""Attributes of modules that may differ between replicas."""
LISTED_TEXT = {bool, int, str, bytes, type(None)}
"""Types of which a whole list is one leaf."""
MOST_DEEP = 150
"""The most containers around a value. The walk of more would exhaust the stack."""
MOST_TWICE = 64
"""The most leaves of an object that are taken again where the object occurs again.

An object with more becomes one leaf there, or else objects that share their parts, such
as a figure's, would have a number of leaves exponential in their depth.
"""
LARGE_BITS = 4096
"""Integers with more bits have hexadecimal texts: Python limits decimal ones."""


class TooSlow(Exception):
    """A deadline has passed."""


class Deadline:
    """A moment after which `check` raises TooSlow.

    Args:
        limit_s: Seconds from now; None for no limit.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._end = float("inf") if limit_s is None else time.monotonic() + limit_s

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise TooSlow(f"it takes longer than {self._limit_s:.2g} s")


@dataclass(frozen=True, eq=False)
class Leaf:
    """One tensor, array or plain value of a larger value."""

    name: str
    form: str
    """What must agree beside the content: type, or dtype and shape."""
    content: Content | None
    """None if the leaf cannot be compared."""
    uncompared: str = ""
    """Why it cannot be compared."""


def leaves_of(name: str, value: object, deadline: Deadline | None = None) -> list[Leaf]:
    """The leaves of a value, in an order that is equal for equal values.

    Tensors and arrays are taken apart without a copy. Modules have their parameters,
    buffers, classes and plain attributes as leaves, optimizers and schedulers their
    `state_dict`, and other objects what `pickle` would save.

    Args:
        name: The value's name, with which the names of the leaves begin.
        value: Any object.
        deadline: When to give up.

    Raises:
        TooSlow: The deadline has passed.
    """
    walk = _Walk(deadline or Deadline())
    with torch.no_grad():
        walk.take(name, value)
    return walk.leaves


def is_dataframe(value: object) -> bool:
    """Whether a value is pandas's DataFrame or Series."""
    kinds = {"DataFrame", "Series"}
    return name_of_kind(value) in kinds and _module_of(value).startswith("pandas")


def name_of_kind(value: object) -> str:
    """The name of a value's class. No code of the class runs."""
    return str(type.__dict__["__name__"].__get__(type(value)))


class _Walk:
    """Collects the leaves of one value."""

    def __init__(self, deadline: Deadline) -> None:
        self.leaves: list[Leaf] = []
        self._deadline = deadline
        self._open: dict[int, str] = {}
        """The values that are being taken apart, by id, with their names."""
        self._large: dict[int, tuple[str, object]] = {}
        """The objects of many leaves by id, which stays theirs, with their names."""
        self._rules: list[tuple[type | tuple[type, ...], Callable[..., None]]] = [
            (Tensor, self._tensor),
            (np.ndarray, self._array),
            (np.generic, self._numpy_scalar),
            (nn.Module, self._module),
            ((torch.optim.Optimizer, LRScheduler), self._state_dict),
            (torch.Generator, self._generator),
            (Enum, self._enum),
            ((set, frozenset), self._set),
            ((type, FunctionType), self._named),
        ]

    def take(self, name: str, value: Any) -> None:
        """Add the leaves of a value. An error makes it one that is not compared."""
        self._deadline.check()
        if id(value) in self._open:
            path = self._open[id(value)]
            self._text(name, value, f"cycle {len(path)}")
            return
        if len(self._open) >= MOST_DEEP:
            self._refuse(name, value, "it is nested too deeply")
            return
        self._open[id(value)] = name
        count = len(self.leaves)
        try:
            self._take(name, value)
        except (TooSlow, MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - any object may be looked at
            del self.leaves[count:]
            self._refuse(name, value, _why(error))
        finally:
            del self._open[id(value)]

    def _take(self, name: str, value: Any) -> None:
        kind = type(value)
        if kind in EXACT_TEXT:
            self._text(name, value, _exact_text(value))
        elif kind is float:
            self._add(name, "float", _octets(value))
        elif kind is complex:
            self._add(name, "complex", _octets(value.real) + _octets(value.imag))
        elif kind is dict:
            self._mapping(name, "dict", value)
        elif kind is OrderedDict:
            self._mapping(name, "OrderedDict", value, ordered=True)
        elif kind in (list, tuple):
            self._sequence(name, kind.__name__, list(value))
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            self._add(name, _kind_of(value), b"")
            for field, item in zip(kind._fields, value, strict=True):
                self.take(f"{name}.{field}", item)
        elif is_dataframe(value):
            self._dataframe(name, value)
        else:
            for kinds, rule in self._rules:
                # The type, because `isinstance` asks the value for its class.
                if issubclass(kind, kinds):
                    rule(name, value)
                    return
            self._pickled(name, value)

    def _add(self, name: str, form: str, content: Content) -> None:
        self.leaves.append(Leaf(name, form, content))

    def _text(self, name: str, value: object, text: str) -> None:
        octets = text.encode("utf-8", "surrogatepass")
        self._add(name, _kind_of(value), octets)

    def _refuse(self, name: str, value: object, why: str) -> None:
        self.leaves.append(Leaf(name, _kind_of(value), None, why))

    # -- containers ---------------------------------------------------------------

    def _sequence(self, name: str, kind: str, items: list[Any]) -> None:
        form = f"{kind} of {len(items)}"
        kinds = set(map(type, items))
        if kinds == {float}:
            self._add(name, f"{form} float", np.array(items))
        elif kinds == {int} and _fits(items):
            self._add(name, f"{form} int", np.array(items, np.int64))
        elif kinds <= LISTED_TEXT | {float} and not any(map(_is_large, items)):
            texts = [(0, _octets(x)) if type(x) is float else x for x in items]
            self._add(name, form, repr(texts).encode("utf-8", "surrogatepass"))
        else:
            self._add(name, form, b"")
            for index, item in enumerate(items):
                self.take(f"{name}[{index}]", item)

    def _mapping(
        self, name: str, kind: str, value: Mapping[Any, Any], *, ordered: bool = False
    ) -> None:
        items = {_key_text(key): item for key, item in list(value.items())}
        self._add(name, f"{kind} of {len(items)}", b"")
        for text in items if ordered else sorted(items):
            self.take(f"{name}[{text}]", items[text])

    def _set(self, name: str, value: Any) -> None:
        texts = "\n".join(sorted(map(_key_text, value)))
        self._text(name, value, texts)

    def _dataframe(self, name: str, frame: Any) -> None:
        is_frame = type(frame).__name__ == "DataFrame"
        self._index(f"{name}.index", frame.index)
        if not is_frame:
            self._column(name, frame)
            return
        self._index(f"{name}.columns", frame.columns)
        for index, column in enumerate(frame.columns):
            self._column(f"{name}[{_label(column)}]", frame.iloc[:, index])

    def _index(self, name: str, index: Any) -> None:
        if type(index).__name__ == "RangeIndex":
            self._text(name, index, repr((index.start, index.stop, index.step)))
        else:
            self.take(name, list(index))

    def _column(self, name: str, series: Any) -> None:
        form, dtype = f"column {series.dtype}", series.dtype
        if isinstance(dtype, np.dtype) and not dtype.hasobject:
            self.take(name, series.to_numpy())
        elif hasattr(series, "cat"):
            self._add(name, form, b"")
            self.take(f"{name}.codes", series.cat.codes.to_numpy())
            self._index(f"{name}.categories", series.cat.categories)
        else:
            self._add(name, form, b"")
            self.take(name, series.tolist())

    # -- tensors, arrays and what holds them --------------------------------------

    def _tensor(self, name: str, tensor: Tensor) -> None:
        if issubclass(type(tensor), UninitializedTensorMixin):
            self._refuse(name, tensor, "it has no values yet")
            return
        if not has_memory(type(tensor)):
            self._wrapped(name, tensor)
            return
        with torch._C.DisableTorchFunctionSubclass():
            self._plain_tensor(name, tensor.detach())

    def _wrapped(self, name: str, tensor: Any) -> None:
        """A tensor that is made of others, such as a DTensor."""
        placements = getattr(tensor, "placements", None)
        if placements is not None and all(p.is_replicate() for p in placements):
            self.take(name, tensor._local_tensor)
        elif placements is not None:
            self._refuse(name, tensor, "its ranks hold different parts of it")
        else:
            self._refuse(name, tensor, "its class has no content of its own")

    def _plain_tensor(self, name: str, tensor: Tensor) -> None:
        shape = "×".join(map(str, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        form = f"{dtype} {shape} {tensor.device.type}".replace("  ", " ")
        if tensor.is_meta:
            self._refuse(name, tensor, "it has no values")
        elif tensor.is_nested or tensor.is_mkldnn:
            self._refuse(name, tensor, f"its layout is {tensor.layout}")
        elif tensor.layout == torch.sparse_coo:
            check_tensor(tensor._indices())
            check_tensor(tensor._values())
            tensor = tensor.coalesce()
            self._add(name, f"sparse {form}", b"")
            self.take(f"{name}.indices", tensor.indices())
            self.take(f"{name}.values", tensor.values())
        elif tensor.layout != torch.strided:
            by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
            first, second = ("crow", "col") if by_row else ("ccol", "row")
            self._add(name, f"{tensor.layout} {form}", b"")
            for part in (f"{first}_indices", f"{second}_indices", "values"):
                self.take(f"{name}.{part}", getattr(tensor, part)())
        else:
            check_tensor(tensor)
            if tensor.is_quantized:
                self._quantized(name, form, tensor)
            else:
                self._add(name, form, tensor)

    def _quantized(self, name: str, form: str, tensor: Tensor) -> None:
        self._add(name, f"{tensor.qscheme()} {form}", tensor.int_repr())
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            self.take(f"{name}.scale", tensor.q_scale())
            self.take(f"{name}.zero_point", tensor.q_zero_point())
        else:
            self.take(f"{name}.scales", tensor.q_per_channel_scales())
            self.take(f"{name}.zero_points", tensor.q_per_channel_zero_points())
            self.take(f"{name}.axis", tensor.q_per_channel_axis())

    def _array(self, name: str, array: np.ndarray[Any, Any]) -> None:
        check_array(array)
        shape = "×".join(map(str, array.shape))
        form = f"{_kind_of(array)} {array.dtype.str} {shape}".rstrip()
        if isinstance(array, np.ma.MaskedArray):
            self._add(name, form, b"")
            self.take(f"{name}.mask", np.ma.getmaskarray(array))
            self.take(f"{name}.data", array.compressed())
        elif array.dtype.names is not None:  # there may be padding between the fields
            self._add(name, form, b"")
            for field in array.dtype.names:
                self.take(f"{name}[{field!r}]", np.asarray(array[field]))
        elif array.dtype.hasobject or array.dtype.kind == "T":
            self._add(name, form, b"")
            self.take(name, array.ravel().tolist())
        elif array.dtype.kind == "V" or array.dtype.char in "gG":
            self._refuse(name, array, f"a {array.dtype} may have unused bits")
        else:
            self._add(name, form, np.asarray(array))

    def _numpy_scalar(self, name: str, value: np.generic) -> None:
        self._array(name, np.asarray(value))

    def _module(self, name: str, module: nn.Module) -> None:
        parts = [(n, _kind_of(m), m.training) for n, m in module.named_modules()]
        self._add(f"{name} (modules)", "names", repr(parts).encode())
        for n, parameter in module.named_parameters():
            self.take(f"{name}.{n}", parameter)
        for n, buffer in module.named_buffers():
            self.take(f"{name}.{n}", buffer)
        for n, part in module.named_modules():
            path = ".".join(filter(None, (name, n)))
            if text := _options(part):
                self._add(
                    f"{path} (options)", "options", text.encode("utf-8", "replace")
                )
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                self.take(f"{path}.extra_state", part.get_extra_state())

    def _state_dict(self, name: str, value: Any) -> None:
        state = value.state_dict()
        for key in sorted(state, key=str):
            self.take(f"{name}.{key}", state[key])

    def _generator(self, name: str, generator: torch.Generator) -> None:
        self.take(name, generator.get_state())

    # -- other objects ------------------------------------------------------------

    def _enum(self, name: str, value: Enum) -> None:
        self._text(name, value, value.name)

    def _named(self, name: str, value: Any) -> None:
        """A class or function: equal names mean equal values if a file defines it."""
        module = getattr(value, "__module__", None)
        owner: Any = sys.modules.get(module) if module else None
        for part in value.__qualname__.split("."):
            owner = getattr(owner, part, None)
        if owner is not value or module == "__main__":
            self._refuse(name, value, "it is defined in a cell, or has no name")
        else:
            self._text(name, value, f"{module}.{value.__qualname__}")

    def _pickled(self, name: str, value: Any) -> None:
        """Take an object apart as `pickle` does."""
        if id(value) in self._large:
            first_name, _ = self._large[id(value)]
            self._text(name, value, f"again {first_name}")
            return
        before = len(self.leaves)
        self._take_state(name, value)
        if len(self.leaves) - before > MOST_TWICE:
            self._large[id(value)] = name, value

    def _take_state(self, name: str, value: Any) -> None:
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            self._text(name, value, reduced)
            return
        _function, args, state, items, pairs = (*reduced, None, None, None)[:5]
        if items is None and pairs is None:
            self._add(name, _kind_of(value), b"")
        for index, arg in enumerate(args):
            if arg is not type(value):  # the first argument of `copyreg.__newobj__`
                self.take(f"{name}.<argument {index}>", arg)
        if items is not None:
            self._sequence(name, _kind_of(value), list(items))
        if pairs is not None:
            self._mapping(name, _kind_of(value), dict(pairs))
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict) and all(isinstance(key, str) for key in part):
                for key in sorted(part):
                    self.take(f"{name}.{key}", part[key])
            elif part is not None:
                self.take(f"{name}.<state>", part)


def _options(module: nn.Module) -> str:
    """The plain public attributes of a module itself, such as a Dropout's `p`.

    The numbers with a fraction come first, because a report shows the beginning. What
    torch's own wrappers know of their ranks is left out.
    """
    if _module_of(module).startswith(("torch.nn.parallel", "torch.distributed")):
        return ""
    plain = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and key not in RANKS_OWN
        and key != "training"
        and _is_plain(value)
    }
    keys = sorted(plain, key=lambda key: (type(plain[key]) is not float, key))
    return ", ".join(f"{key}={plain[key]!r}" for key in keys)


def _is_plain(value: object) -> bool:
    kind = type(value)
    if kind in (tuple, list):
        return all(type(each) in LISTED_TEXT | {float} for each in value)  # type: ignore[attr-defined]
    return kind is float or (kind in EXACT_TEXT and kind is not torch.device)


def _kind_of(value: object) -> str:
    module = _module_of(value)
    name = str(type.__dict__["__qualname__"].__get__(type(value)))
    return name if module == "builtins" else f"{module}.{name}"


def _module_of(value: object) -> str:
    module = type.__dict__["__module__"].__get__(type(value))
    return module if type(module) is str else "?"  # a class may have a property


def _octets(number: float) -> bytes:
    return struct.pack("<d", number)


def _exact_text(value: object) -> str:
    return hex(value) if _is_large(value) else repr(value)  # type: ignore[arg-type]


def _is_large(value: object) -> bool:
    return type(value) is int and value.bit_length() > LARGE_BITS


def _fits(items: list[int]) -> bool:
    """Whether all integers fit into 64 bits."""
    return min(items) >= -(2**63) and max(items) < 2**63


def _key_text(key: object) -> str:
    """A text of a key or a set's element, which differs for different values.

    Raises:
        TypeError: There is none.
    """
    kind = type(key)
    if isinstance(key, float) and kind is float:
        return f"nan {_octets(key).hex()}" if key != key else repr(key)
    if kind in EXACT_TEXT:
        return _exact_text(key)
    if kind in (tuple, frozenset):
        texts = [_key_text(each) for each in key]  # type: ignore[attr-defined]
        texts = texts if kind is tuple else sorted(texts)
        return f"{kind.__name__}({', '.join(texts)})"
    if isinstance(key, Enum):
        return f"{_kind_of(key)}.{key.name}"
    if isinstance(key, np.generic) and key.dtype.kind in "biufSUmM":
        return f"{key.dtype.str} {key.tobytes().hex()}"
    raise TypeError(f"a key or element is a {_kind_of(key)}")


def _label(column: object) -> str:
    try:
        return _key_text(column)
    except TypeError:
        return str(column)


def _why(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = " ".join(message_of(error).split()) or type(error).__name__
    return text if len(text) <= 100 else f"{text[:99]}…"
