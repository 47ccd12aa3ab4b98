"""Values of all kinds, drawn at random: whole ones, and ones that break when looked at.

The functions run on ranks.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import itertools
import mmap
import os
import pathlib
import queue
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import types
import uuid
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

__all__ = ["BROKEN", "WHOLE", "define", "drawn", "forget", "is_shown", "remove_files"]

_FOLDER = pathlib.Path(tempfile.gettempdir()) / f"odd-values-{os.getpid()}"


def _path() -> str:
    _FOLDER.mkdir(exist_ok=True)
    return str(_FOLDER / uuid.uuid4().hex)


def remove_files() -> None:
    shutil.rmtree(_FOLDER, ignore_errors=True)


# -- whole values ----------------------------------------------------------------------

DTYPES = [
    name
    for name in [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    if hasattr(torch, name)
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (2, 0, 3), (4, 5), (2, 3, 4)]
SHAPES += [(5000,), (300, 70), (1, 1, 1)]


def tensor(r: random.Random) -> Any:
    made = torch.zeros(r.choice(SHAPES), dtype=torch.float32)
    made = made + torch.tensor(r.choice([0.0, 1.0, 2.5, float("nan"), float("inf")]))
    return made.nan_to_num(1.0, 1.0).to(getattr(torch, r.choice(DTYPES)))


def viewed(r: random.Random) -> Any:
    base = torch.arange(r.choice([24.0, 4800.0]))
    ways: list[Callable[[Any], Any]] = [
        lambda t: t.view(4, -1).t(),
        lambda t: t[::3],
        lambda t: t[:1].expand(10**6),
        lambda t: t[5:5],
        lambda t: t.view(2, 3, -1).permute(2, 0, 1),
        lambda t: t.as_strided((3, 3), (1, 1)),
        lambda t: t[:, None].expand(-1, 50),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: t.requires_grad_() * 2,
        lambda t: t.share_memory_(),
        lambda t: t.to_sparse(),
        lambda t: t.view(4, -1).to_sparse_csr(),
        lambda t: t.view(4, -1).to_sparse_csc(),
        lambda t: torch.quantize_per_tensor(t, 0.5, 0, torch.qint8),
        lambda t: torch.quantize_per_channel(
            t.view(4, -1), torch.ones(4), torch.zeros(4), 0, torch.quint8
        ),
        lambda t: torch.nested.nested_tensor([t, t[:3]]),
        lambda t: torch.nested.nested_tensor([t, t[:3]], layout=torch.jagged),
        lambda t: t.to_mkldnn(),
        lambda t: t.to("meta"),
        lambda t: masked_tensor(t, t > 3),
        lambda t: t.untyped_storage(),
        lambda t: Traced(t),
        lambda t: nn.Parameter(t),
        lambda t: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,)),
    ]
    return r.choice(ways)(base)


class Traced(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def numpy_array(r: random.Random) -> Any:
    kinds = [
        "?",
        "i1",
        "u2",
        ">i4",
        "<f2",
        "f4",
        ">f8",
        "g",
        "c8",
        "c16",
        "M8[D]",
        "m8[s]",
        "S3",
        "U2",
        "O",
        "V4",
    ]
    made = np.zeros(r.choice(SHAPES), r.choice(kinds))
    ways: list[Callable[[Any], Any]] = [
        lambda a: a,
        lambda a: a.T,
        lambda a: a[..., None][..., ::-1],
        lambda a: np.broadcast_to(a, (7, *a.shape)),
        lambda a: np.ma.masked_array(a, False),
        lambda a: a.ravel()[:1].reshape(-1),
        lambda a: np.zeros(3, [("a", "i1"), ("b", "f8")]),
        lambda a: np.zeros(3, [("a", "i1"), ("b", "f8")]).view(np.recarray),
        lambda a: np.float32(3),
        lambda a: np.datetime64("2020-01-01"),
    ]
    return r.choice(ways)(made)


def mapped(r: random.Random) -> Any:
    path = _path()
    np.save(path, np.arange(r.choice([5, 30_000]), dtype="f8"))
    return np.load(f"{path}.npy", mmap_mode=r.choice(["r", "r+", "c"]))


def frame(r: random.Random) -> Any:
    columns: dict[str, Any] = {
        "i": pd.array([1, None, 3], dtype="Int64"),
        "s": pd.array(["a", None, "b"], dtype="string"),
        "c": pd.Categorical(["x", "y", "x"]),
        "t": pd.date_range("2020", periods=3, tz="UTC"),
        "d": pd.to_timedelta([1, 2, 3], unit="s"),
        "p": pd.period_range("2020", periods=3, freq="M"),
        "v": pd.arrays.IntervalArray.from_breaks([0, 1, 2, 3]),
        "o": [object(), [1], None],
        "z": pd.arrays.SparseArray([0, 0, 1]),
        "f": [1.0, float("nan"), 2.0],
    }
    names = r.sample(sorted(columns), r.randint(0, 4))
    made = pd.DataFrame({name: columns[name] for name in names})
    series = pd.Series(columns[r.choice(sorted(columns))])
    return r.choice([made, series, made.index, made.T, series.array])


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


Point = collections.namedtuple("Point", "x y")


class Slots:
    __slots__ = ("a",)


def standard(r: random.Random) -> Any:
    def generate() -> Any:
        yield 1

    with open(os.devnull) as closed:
        pass
    makers: list[Callable[[], Any]] = [
        lambda: 10**5000, lambda: -1, lambda: float("nan"), lambda: 1j, lambda: None,
        lambda: "x" * 500, lambda: "\ud800", lambda: b"\0" * 90, lambda: ...,
        lambda: bytearray(5000), lambda: memoryview(b"abc"), lambda: range(10**12),
        lambda: slice(1, 2), lambda: threading.Lock(), lambda: threading.RLock(),
        lambda: threading.Event(), lambda: queue.Queue(), lambda: closed,
        lambda: io.StringIO("x"), lambda: generate(), lambda: iter([1]),
        lambda: itertools.count(), lambda: decimal.Decimal("1.5"),
        lambda: fractions.Fraction(1, 3), lambda: datetime.datetime(2020, 1, 1),
        lambda: re.compile("x"), lambda: uuid.UUID(int=5), lambda: pathlib.Path("/"),
        lambda: Color.RED, lambda: Point(1, [2]), lambda: Slots(), lambda: object(),
        lambda: types.SimpleNamespace(a=1), lambda: types.MappingProxyType({1: 2}),
        lambda: collections.Counter("abca"), lambda: collections.deque([1], 3),
        lambda: collections.defaultdict(list, a=[1]), lambda: array.array("d", [1.0]),
        lambda: collections.ChainMap({1: 1}), lambda: sys._getframe(),
        lambda: weakref.WeakValueDictionary(), lambda: ValueError("x"),
        lambda: mmap.mmap(-1, 100), lambda: random.Random(1), lambda: lambda: 1,
        lambda: print, lambda: "".join, lambda: torch.Generator(),
        lambda: torch.float32, lambda: torch.device("cpu"), lambda: torch.Size([2]),
        lambda: {torch.ones(1): 1}, lambda: {(1, frozenset([2])): 3}, lambda: {1, "a"},
        lambda: np.random.default_rng(1), lambda: frozenset(), lambda: NotImplemented,
    ]  # fmt: skip
    return r.choice(makers)()


def module(r: random.Random) -> Any:
    makers: list[Callable[[], Any]] = [
        lambda: nn.Linear(3, 2),
        lambda: nn.LazyLinear(2),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda: torch.jit.script(nn.Linear(3, 2)),
        lambda: nn.ParameterDict({"a": torch.ones(2)}),
        lambda: nn.Module(),
        lambda: torch.optim.Adam(nn.Linear(3, 2).parameters()),
        lambda: nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        lambda: torch.utils.data.DataLoader([1, 2, 3]),
        lambda: nn.Linear(2, 2).state_dict(),
        lambda: torch.fx.symbolic_trace(nn.Linear(2, 2)),
        lambda: nn.Linear(3, 2, device="meta"),
    ]
    return r.choice(makers)()


WHOLE = [tensor, viewed, numpy_array, mapped, frame, standard, module]


# -- broken values ---------------------------------------------------------------------


def cut_map(r: random.Random) -> Any:
    """Memory of a file that has become shorter."""
    path, size = _path(), 30_000
    np.save(path, np.ones(size))
    way = r.randrange(6)
    made: Any = np.load(f"{path}.npy", mmap_mode=r.choice(["r", "r+", "c"]))
    if way == 1:
        made = torch.from_numpy(made)
    elif way == 2:
        made = torch.from_file(f"{path}.npy", shared=True, size=size)
    elif way == 3:
        made = torch.from_file(f"{path}.npy", shared=False, size=size)
    elif way == 4:
        with open(f"{path}.npy", "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        made = np.frombuffer(memory, np.uint8)
    elif way == 5:
        made = pd.DataFrame(made.reshape(-1, 10), copy=False)
    os.truncate(f"{path}.npy", r.choice([0, 4096, 60_000]))
    if way < 2 and r.random() < 0.5:
        made = made[::-1] if way == 0 else made.view(10, -1).t()
    return made


def freed(r: random.Random) -> Any:
    made = torch.ones(r.choice([1, 1000, 10**6]))
    keep = r.choice([made, made.view(-1, 1), made[-1:], nn.Parameter(made)])
    made.untyped_storage().resize_(r.choice([0, 2]))
    return keep


def without_memory(r: random.Random) -> Any:
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x.sum()

    way = r.randrange(7)
    if way == 0:
        return FakeTensorMode().from_tensor(torch.ones(r.choice([1, 3, 10**6])))
    if way == 1:
        with FakeTensorMode():
            return nn.Linear(1000, 1000)
    if way == 2:
        torch.func.vmap(keep)(torch.ones(3, 2))
    elif way == 3:
        torch.func.grad(keep)(torch.ones(3))
    elif way == 4:
        return torch._efficientzerotensor((3,))
    elif way == 5:
        return torch._to_functional_tensor(torch.ones(3))
    else:
        with FakeTensorMode():
            return torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1)
    return kept[0]


ERRORS = [SystemExit, KeyboardInterrupt, RecursionError, ValueError, GeneratorExit]
METHODS = "__repr__ __reduce__ __reduce_ex__ __len__ __iter__ __getstate__ __str__"
METHODS += " __class__ shape dtype __dict__ __getattribute__ __eq__ __bool__ __hash__"
METHODS += " __doc__ _repr_html_ _repr_pretty_ _ipython_display_ __del__ __module__"


def rude(r: random.Random) -> Any:
    """An object of which one attribute or method raises, blocks or is of no use."""
    error, names = r.choice(ERRORS), r.sample(METHODS.split(), 2)
    how = r.randrange(4)

    def act(*_: Any) -> Any:
        if how == 0:
            time.sleep(60)
        if how == 1:
            return 5
        raise error("no")

    wrap = property if r.random() < 0.5 else (lambda function: function)
    parents: tuple[Any, ...] = r.choice(
        [(), (), (dict,), (list,), (int,), (np.ndarray,), (torch.Tensor,), (nn.Module,)]
    )
    names = [name for name in names if name not in ("__del__", "__getattribute__")]
    if how == 0:  # IPython asks each variable for these in each cell
        names = [name for name in names if name in ("__repr__", "__reduce__", "shape")]
    body = {name: wrap(act) for name in names}
    kind: Any = type("Rude", parents, {"rude": True})
    try:
        if parents == (np.ndarray,):
            made = np.ones(3).view(kind)
        elif parents == (torch.Tensor,):
            made = torch.ones(3).as_subclass(kind)
        else:
            made = kind()
    except BaseException:  # noqa: BLE001 - it raises what `ERRORS` has
        made = kind.__new__(kind)
    for name, function in body.items():  # after it was made
        try:
            setattr(kind, name, function)
        except (TypeError, AttributeError):
            continue
    return made


def dead_proxy(r: random.Random) -> Any:
    class Target:
        pass

    class Unbound:
        """As werkzeug's LocalProxy of no request."""

        @property
        def __class__(self) -> Any:
            raise RuntimeError("working outside of a request")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("working outside of a request")

    return r.choice([weakref.proxy(Target()), weakref.ref(Target()), Unbound()])


def deep(r: random.Random) -> Any:
    made: Any = []
    if r.random() < 0.3:
        made.append(made)
    for _ in range(r.choice([50, 5000])):
        made = r.choice([[made], {"a": made}, (made, 1)])
    return made


BROKEN = [cut_map, freed, without_memory, rude, dead_proxy, deep]


def drawn(seed: int, broken: bool | None = None) -> Any:
    """One value, perhaps in a container. Equal seeds give equal values."""
    r = random.Random(seed)
    is_broken = r.random() < 0.5 if broken is None else broken
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = r.choice(BROKEN if is_broken else WHOLE)(r)
        wrap = r.choice([
            lambda v: v, lambda v: v, lambda v: v, lambda v: [v], lambda v: (v, 1),
            lambda v: {"a": v}, lambda v: Pair(1, v), lambda v: Point(v, 2),
            lambda v: types.SimpleNamespace(v=v), lambda v: collections.deque([v]),
        ])  # fmt: skip
        return wrap(made)


def define(namespace: dict[str, Any], seeds: list[int]) -> None:
    """Put a value of each seed into a namespace, as `v_<seed>`."""
    for seed in seeds:
        namespace[f"v_{seed}"] = drawn(seed)


def is_shown(value: object) -> bool:
    """Whether the table of variables has a row for this value."""
    kinds = types.ModuleType, types.FunctionType, type
    return not issubclass(type(value), kinds)


def forget(seeds: list[int]) -> None:
    """Remove the values of `define` from a rank."""
    import __main__

    for seed in seeds:
        vars(__main__).pop(f"v_{seed}", None)
