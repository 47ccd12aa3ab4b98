"""A rank's values as text: in full for `%dist_inspect`, short for `%dist_vars`."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import inspect
import itertools
import math
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nbdist.engine.rank import this_rank
from nbdist.engine.reachable import check_reachable
from nbdist.engine.user_variables import user_variables
from nbdist.engine.value_digest import digest_of
from nbdist.engine.value_numbers import histogram_of, norm_of, numbers_of
from nbdist.errors import encodable
from nbdist.ipc.own_memory import (
    Unreadable,
    check_array,
    check_tensor,
    has_memory,
)
from nbdist.training.leaves import Deadline, TooSlow, is_dataframe, name_of_kind

__all__ = ["InFull", "in_full", "short_text"]

TEXT_LIMIT = 60
HISTOGRAM_BINS = 9
MOST_ROWS = 100
"""The most parameters or attributes in a table."""
PNG = "image/png"
SPARSE = {
    torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr,
    torch.sparse_bsc,
}  # fmt: skip
BARS = " ▁▂▃▄▅▆▇█"
REACH = 1_000
"""The most objects whose memory is checked before a text is made."""
LONGEST_INT_BITS = 4096


class InFull(NamedTuple):
    """A value as it is shown."""

    text: str
    rows: tuple[str, ...] = ()
    """If the last lines of the text are the rows of a table, the digest of each row."""
    image: str = ""
    """A PNG in base64, of a value that has one, such as a figure."""


def in_full(value: Any, deadline: Deadline, *, images: bool = True) -> InFull:
    """A value as IPython prints it, and more of what torch and dataclasses hold.

    A tensor has its statistics, a module a table of its parameters, and an optimizer
    one of its state. An object whose `repr` is Python's own, and one of a dataclass,
    has a table of its attributes. A table of numbers ends where the deadline passes.

    Args:
        images: Whether the value's image is made, which takes a while.

    Raises:
        Exception: The value's `__repr__` has raised.
    """
    if _has_only_attributes(value):
        return _with_table(name_of_kind(value), _attributes(value), deadline)
    try:
        check_reachable(value, REACH, deadline)
    except Unreadable as error:
        return InFull(f"<cannot be shown: {error}>")
    text = encodable(_formatted("text/plain", value) or repr(value))
    kind = type(value)  # `isinstance` may run the value's own code
    with contextlib.suppress(RuntimeError):  # torch lacks it for some dtypes
        if issubclass(kind, torch.Tensor) and value.numel() > 1:
            text += f"\n{_statistics(value.detach(), deadline)}"
    if issubclass(kind, torch.nn.Module):
        return _with_table(f"{text}\n", _parameters(value), deadline)
    if issubclass(kind, torch.optim.Optimizer):
        return _with_table(f"{text}\n", _optimizer_state(value), deadline)
    return InFull(text, image=_image(value) if images else "")


def _image(value: Any) -> str:
    """A value's PNG image in base64; "" if it has none, or cannot make it."""
    try:
        image = _formatted(PNG, value) or ""
    except TooSlow:
        raise
    except Exception:  # noqa: BLE001 - it has its text
        return ""
    if isinstance(image, bytes):
        return base64.b64encode(image).decode()
    return encodable(image) if isinstance(image, str) else ""


def _formatted(form: str, value: Any) -> Any:
    """What IPython's formatter makes of a value; None if it makes nothing.

    `DisplayFormatter.format` would let the value display itself, and would show its
    error: both among the output of the cell that is running.

    Raises:
        Exception: The value's method has raised.
    """
    formatter = this_rank().shell.display_formatter.formatters[form]
    with contextlib.suppress(NotImplementedError):
        return inspect.unwrap(type(formatter).__call__)(formatter, value)
    return None


# -- tables ----------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of a table."""

    cells: tuple[str, ...]
    values: object
    """What the row shows, to be compared with the other ranks' rows."""


class _Table(NamedTuple):
    header: tuple[str, ...]
    """Empty for a table without one."""
    rows: Iterator[_Row]
    total: int
    """The number of rows, if all are shown."""
    what: str
    """What a row shows, in plural."""
    numbers: bool
    """Whether the columns but for the first one have numbers."""


@torch.no_grad()
def _with_table(text: str, table: _Table, deadline: Deadline) -> InFull:
    """A text with a table below it, and the digest of each row."""
    rows: list[tuple[str, ...]] = []
    digests: list[str] = []
    is_late = False
    for row in itertools.islice(table.rows, MOST_ROWS):
        digest = ""
        if not is_late:
            try:
                found, why = digest_of(row.cells[0], row.values, deadline)
                digest = "" if why else found
            except TooSlow:
                is_late = True
        if is_late and table.numbers:  # which take long too
            break
        rows.append(row.cells)
        digests.append(digest)
    if not rows:
        return InFull(text.rstrip("\n"))
    if table.header:
        lines = _aligned([table.header, *rows], table.numbers)
    else:
        lines = [f"  {line}" for line in _aligned(rows, table.numbers)]
    if len(rows) < table.total:
        lines.insert(0, f"the first {len(rows)} of {table.total:,} {table.what}:")
    return InFull("\n".join([text, *lines]), tuple(digests))


def _aligned(rows: Sequence[tuple[str, ...]], numbers: bool) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    adjust = str.rjust if numbers else str.ljust
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *map(adjust, rest, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return lines


def _parameters(module: torch.nn.Module) -> _Table:
    """A module's parameters and their gradients.

    A sharded parameter has the norm of this rank's shard.
    """
    parameters = list(module.named_parameters())
    rows = (
        _Row((name, *_norms(parameter)), (parameter, parameter.grad))
        for name, parameter in parameters
    )
    header = "parameter", "shape", "norm", "norm of gradient"
    return _Table(header, rows, len(parameters), "parameters", numbers=True)


def _norms(parameter: torch.nn.Parameter) -> tuple[str, str, str]:
    """A parameter's shape, norm and gradient's norm."""
    if torch.nn.parameter.is_lazy(parameter):
        return "not known yet", "", ""
    shape = _shape_text(parameter)
    if not parameter.requires_grad:
        return shape, _norm_text(parameter), "frozen"
    gradient = "none" if parameter.grad is None else _norm_text(parameter.grad)
    return shape, _norm_text(parameter), gradient


def _optimizer_state(optimizer: torch.optim.Optimizer) -> _Table:
    """What an optimizer keeps of each parameter: norms of tensors, and numbers."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = {key: dict(each) for key, each in list(optimizer.state.items())}
    names = _names_of_parameters()
    keys = list(dict.fromkeys(key for each in state.values() for key in each))
    rows = (
        _Row(
            (
                names.get(id(parameter), str(index)),
                _shape_text(parameter),
                *(_state_text(own.get(key)) for key in keys),
            ),
            own,
        )
        for index, parameter in enumerate(parameters)
        if (own := state.get(parameter)) is not None
    )
    header = "parameter", "shape", *map(str, keys)
    return _Table(header, rows, len(state), "parameters", numbers=True)


def _names_of_parameters() -> dict[int, str]:
    """The names of the parameters of the user's modules, by id."""
    names: dict[int, str] = {}
    for name, value in user_variables().items():
        if issubclass(type(value), torch.nn.Module):
            for own, parameter in value.named_parameters():
                names.setdefault(id(parameter), f"{name}.{own}")
    return names


def _state_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return _norm_text(value)
    return short_text(value)


def _has_only_attributes(value: object) -> bool:
    """Whether a value's own text says less than its attributes."""
    kind = type(value)
    if issubclass(kind, (type, torch.nn.Module, torch.optim.Optimizer)):
        return False
    if any(hasattr(kind, name) for name in ("_repr_pretty_", "_repr_png_")):
        return False
    if dataclasses.is_dataclass(kind):
        parameters = getattr(kind, "__dataclass_params__", None)
        return bool(parameters and parameters.repr) and bool(dataclasses.fields(kind))
    return kind.__repr__ is object.__repr__ and bool(_public_attributes(value))


def _public_attributes(value: object) -> dict[str, object]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return {
        name: each
        for name, each in dict(attributes).items()
        if isinstance(name, str) and not name.startswith("_")
    }


def _attributes(value: Any) -> _Table:
    """A value's attributes, or the fields of a dataclass."""
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value) if each.repr]
        attributes = {name: getattr(value, name, None) for name in names}
    else:
        attributes = _public_attributes(value)
    rows = (
        _Row((name, _attribute_text(each)), each) for name, each in attributes.items()
    )
    return _Table((), rows, len(attributes), "attributes", numbers=False)


def _attribute_text(value: Any) -> str:
    kind = type(value)  # `isinstance` may run the value's own code
    try:
        if issubclass(kind, (torch.Tensor, np.ndarray)) and value.ndim:
            return f"{_form_text(value)}, {short_text(value)}"
        if is_dataframe(value):
            return f"{kind.__name__} {_shape_text(value)}"
        return short_text(value)
    except Unreadable as error:
        return f"<cannot be shown: {error}>"


# -- short texts ----------------------------------------------------------------------


class _Short(reprlib.Repr):
    """The text of a value's beginning. Memory that it may read is checked before."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 8
        self.maxstring = self.maxother = self.maxlong = 2 * TEXT_LIMIT
        self.maxlevel = 3

    def repr_int(self, number: int, level: int) -> str:
        """The text of an integer. Python refuses to make one of many digits."""
        if number.bit_length() > LONGEST_INT_BITS:
            return f"an integer of {number.bit_length():,} bits"
        return super().repr_int(number, level)

    def repr_instance(self, value: object, level: int) -> str:
        """The text of any other object, whose code is the user's."""
        try:
            if type(value).__repr__ is not object.__repr__:  # which reads no memory
                check_reachable(value, REACH, Deadline())
            text = repr(value)
        except KeyboardInterrupt:
            raise
        except Unreadable as error:
            return f"<cannot be shown: {error}>"
        except BaseException as error:  # noqa: BLE001 - a user's code may do anything
            return f"<repr failed: {type(error).__name__}>"
        if len(text) > self.maxother:
            half = (self.maxother - 3) // 2
            text = f"{text[:half]}...{text[-half:]}"
        return text


_short = _Short()


def short_text(value: Any, deadline: Deadline | None = None) -> str:
    """A text of at most 60 characters; the norm of a tensor or array.

    Raises:
        Unreadable: The memory of a tensor or array cannot be read.
        TooSlow: The deadline has passed.
    """
    deadline = deadline or Deadline()
    kind = type(value)  # `isinstance` may run the value's own code
    if issubclass(kind, torch.Tensor):
        return _norm_of_tensor(value.detach(), deadline)
    if issubclass(kind, np.ndarray):
        return _norm_of_array(value, deadline)
    if issubclass(kind, torch.nn.Module):
        parameters = sum(p.numel() for p in value.parameters())
        return f"{name_of_kind(value)}, {parameters:,} parameters"
    if is_dataframe(value):
        return ""
    try:
        text = _short.repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may do anything
        return f"<repr failed: {type(error).__name__}>"
    if " at 0x" in text:  # an object's address says nothing of its value
        text = object.__repr__(value).split(" at 0x")[0] + ">"
    text = encodable(" ".join(text.split()))
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"


# -- tensors ---------------------------------------------------------------------------


def _shape_text(tensor: Any) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def _form_text(value: Any) -> str:
    """The dtype and shape of a tensor or array."""
    return f"{str(value.dtype).removeprefix('torch.')} {_shape_text(value)}"


def _norm_text(tensor: torch.Tensor) -> str:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    try:
        return _norm(local.detach(), Deadline())
    except RuntimeError:  # torch lacks it for some layouts and dtypes
        return "?"


def _statistics(tensor: torch.Tensor, deadline: Deadline) -> str:
    """Two lines: form and histogram; minimum, maximum, mean, norm, NaNs, infinities."""
    form = f"{_form_text(tensor)} {tensor.device}"
    if tensor.layout != torch.strided or tensor.is_complex():
        return form
    try:
        found = numbers_of(tensor, deadline)
        counts = f"{found.nans} nan, {found.infinities} inf"
        if not found.finite:
            return f"{form}, {counts}"
        bars = ""
        if found.low < found.high:
            histogram = histogram_of(
                tensor, HISTOGRAM_BINS, found.low, found.high, deadline
            )
            most = max(*histogram, 1.0)
            bars = "  " + "".join(
                BARS[math.ceil(each / most * (len(BARS) - 1))] for each in histogram
            )
    except TooSlow as error:
        return f"{form}, no statistics: {error}"
    sampled = ", from a sample" if found.is_sampled else ""
    return (
        f"{form}{bars}\nmin {found.low:.6g}, max {found.high:.6g}, "
        f"mean {found.mean:.6g}, norm {found.norm:.6g}, {counts}{sampled}"
    )


def _norm_of_tensor(tensor: torch.Tensor, deadline: Deadline) -> str:
    if not has_memory(type(tensor)):
        local = getattr(tensor, "_local_tensor", None)  # of a DTensor
        return "" if local is None else _norm_of_tensor(local.detach(), deadline)
    if tensor.is_meta:
        return "no values"
    if tensor.layout in SPARSE:
        if tensor.layout == torch.sparse_coo and not tensor.is_coalesced():
            return f"sparse, {tensor._nnz():,} values, some perhaps of one index"
        values = tensor.values()
        text = _norm_of_tensor(values, deadline)
        return f"sparse, {values.numel():,} values, {text}"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        check_tensor(tensor)
        tensor = tensor.dequantize()
    if tensor.numel() == 1:
        check_tensor(tensor)
        return (
            f"{tensor.item():.6g}" if tensor.dtype != torch.bool else str(tensor.item())
        )
    return f"norm {_norm(tensor, deadline)}"


def _norm(content: torch.Tensor | np.ndarray[Any, Any], deadline: Deadline) -> str:
    norm, is_sampled = norm_of(content, deadline)
    text = f"{norm:.6g}"
    if not math.isfinite(norm):
        found = numbers_of(content, deadline)
        text = f"{text} ({found.nans} nan, {found.infinities} inf)"
    return f"{text}, from a sample" if is_sampled else text


def _norm_of_array(array: np.ndarray[Any, Any], deadline: Deadline) -> str:
    if array.dtype.kind not in "biufc":
        return ""
    if array.size == 1:
        check_array(array)
        return f"{array.item():.6g}" if array.dtype.kind in "iuf" else str(array.item())
    return f"norm {_norm(array, deadline)}"
