"""A rank's variables, each described by a few plain values and a digest."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import math
import reprlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch

from nbdist.engine import control_handlers
from nbdist.engine.live_tensors import live_tensors
from nbdist.engine.rank import this_rank
from nbdist.errors import encodable, text_of
from nbdist.training.digest import combined, digests_of
from nbdist.training.leaves import Deadline, TooSlow, is_dataframe, leaves_of
from nbdist.training.replicas import described_leaves
from nbdist.wire import LeafDigest, MemoryReport, Shown, Variable

__all__ = [
    "digest_in_full",
    "leaves",
    "look",
    "memory_report",
    "text_in_full",
    "variables",
]

T = TypeVar("T")

TEXT_LIMIT = 60
HISTOGRAM_BINS = 9
MOST_PARAMETERS = 100
SPARSE = {
    torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr,
    torch.sparse_bsc,
}  # fmt: skip
BARS = " ▁▂▃▄▅▆▇█"
UNINTERESTING = (types.ModuleType, types.FunctionType, type)
IDLE_LIMITS_S = 2.0, 8.0
BUSY_LIMITS_S = 1.0, 1.5
"""Seconds for one variable, and for all, on a rank that is idle, or busy."""
FIRST_ROUND_S = 0.05
FIRST_ROUND_BYTES = 8 << 20
"""What takes longer, or is larger, has its turn after all others."""
GRACE_S = 0.02
"""Seconds within which a function that looks at its deadline ends by itself."""
SWITCH_S = 0.0002
"""Seconds after which a busy thread lets the thread that looks run.

Python's 5 ms pass at each operation of torch, which releases the GIL. A model has
hundreds of tensors.
"""

_short = reprlib.Repr()
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8
_short.maxstring = _short.maxother = _short.maxlong = 2 * TEXT_LIMIT
_short.maxlevel = 3


def variables(pattern: str = "*") -> list[Variable]:
    """The user's variables whose names match a shell pattern, by name.

    The caller is another thread than the main one, which may be changing the values: a
    tensor may be read in the middle of an update. A variable that takes too long has no
    value and is not compared; the others are described.
    """
    rank = this_rank()
    each_s, all_s = BUSY_LIMITS_S if rank.activity else IDLE_LIMITS_S
    end = time.monotonic() + all_s
    namespace = dict(rank.shell.user_ns)
    chosen = {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_")
        and name not in rank.shell.user_ns_hidden
        and fnmatch.fnmatchcase(name, pattern)
        and not isinstance(value, UNINTERESTING)
    }
    large = {name for name, value in chosen.items() if _is_large(value)}
    found: dict[str, Variable] = {}
    with _quick_switches():
        late = []
        for name in chosen.keys() - large:
            found[name], is_late = _described(name, chosen[name], FIRST_ROUND_S)
            late += [name] if is_late else []
        late = sorted(large | set(late))
        for index, name in enumerate(late):
            share_s = (end - time.monotonic()) / (len(late) - index)
            found[name], _ = _described(name, chosen[name], min(each_s, share_s))
    return [found[name] for name in sorted(found)]


def look(expression: str) -> Shown:
    """An expression's value as text, on a rank whose main thread may be busy.

    The expression is evaluated in another thread, while the cell runs. An error or a
    value that takes too long becomes the text.
    """
    try:
        with _quick_switches():
            return _aside.call(_look, expression, limit_s=BUSY_LIMITS_S[1])
    except Exception as error:  # noqa: BLE001 - a user's expression may raise anything
        why = text_of(error)
        return Shown(f"<{why}>", "", why)


def _look(expression: str, limit_s: float) -> Shown:
    deadline = Deadline(limit_s)
    shell = this_rank().shell
    with _stream_of_its_own():
        value = eval(expression, shell.user_global_ns, shell.user_ns)
        text, rows = text_in_full(value, deadline)
        try:
            digest, why = digest_in_full(expression, value, deadline)
        except TooSlow as error:
            digest, why = "", str(error)
        return Shown(text, digest, why, rows)


def leaves(expression: str) -> tuple[list[LeafDigest], str]:
    """The leaves of an expression's value, on a rank whose main thread may be busy.

    The expression is evaluated as in `look`.

    Returns:
        The leaves, and why there are none; "" if there are.
    """
    try:
        with _quick_switches():
            return _aside.call(_leaves, expression, limit_s=BUSY_LIMITS_S[1]), ""
    except Exception as error:  # noqa: BLE001 - a user's expression may raise anything
        return [], encodable(text_of(error))


def _leaves(expression: str, limit_s: float) -> list[LeafDigest]:
    deadline = Deadline(limit_s)
    shell = this_rank().shell
    with _stream_of_its_own():
        value = eval(expression, shell.user_global_ns, shell.user_ns)
        found = leaves_of(expression, value, deadline)
        return described_leaves(found, digests_of(found, deadline))


def memory_report(count: int) -> MemoryReport:
    """What holds this rank's memory, also while its main thread is busy.

    Args:
        count: The number of tensors to describe.
    """
    limit_s = BUSY_LIMITS_S[0] if this_rank().activity else IDLE_LIMITS_S[0]
    with _quick_switches():
        held = live_tensors(limit_s)
    return MemoryReport(
        control_handlers.memory(),
        dict(held.totals),
        dict(held.counts),
        tuple(held.largest(count)),
        held.note,
    )


def text_in_full(value: object, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """A value as IPython prints it, and the digests of the rows of a table in it.

    A tensor has a line with its statistics, and a module a table of its parameters. The
    table ends where the deadline passes.

    Raises:
        Exception: The value's `__repr__` has raised.
    """
    bundle, _metadata = this_rank().shell.display_formatter.format(value)
    # IPython gives no text where `repr` raises. This call raises the same error.
    text = encodable(bundle.get("text/plain") or repr(value))
    with contextlib.suppress(RuntimeError):  # torch lacks it for some dtypes
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            text += f"\n{_statistics(value.detach())}"
    rows: tuple[str, ...] = ()
    if isinstance(value, torch.nn.Module):
        table, rows = _parameter_table(value, deadline)
        text += table
    return text, rows


def digest_in_full(name: str, value: object, deadline: Deadline) -> tuple[str, str]:
    """As `digest_of`, with the gradients of a module, whose norms `text_in_full` shows.

    Raises:
        TooSlow: The deadline has passed.
    """
    if isinstance(value, torch.nn.Module):
        gradients = {each: p.grad for each, p in value.named_parameters()}
        return digest_of(name, (value, gradients), deadline)
    return digest_of(name, value, deadline)


@torch.no_grad()
def _parameter_table(
    module: torch.nn.Module, deadline: Deadline
) -> tuple[str, tuple[str, ...]]:
    """A table of a module's parameters and their gradients, and each row's digest.

    A sharded parameter has the norm of this rank's shard.
    """
    parameters = list(module.named_parameters())
    rows: list[tuple[str, ...]] = []
    digests: list[str] = []
    with contextlib.suppress(TooSlow):
        for name, parameter in parameters[:MOST_PARAMETERS]:
            digest, _why = digest_of(name, (parameter, parameter.grad), deadline)
            rows.append((name, *_norms(parameter)))
            digests.append(digest)
    if not rows:
        return "", ()
    table = [("parameter", "shape", "norm", "norm of gradient"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        name.ljust(widths[0])
        + "".join(
            f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)
        )
        for name, *rest in table
    ]
    if len(rows) < len(parameters):
        lines.insert(0, f"the first {len(rows)} of {len(parameters):,} parameters:")
    return "\n\n" + "\n".join(map(str.rstrip, lines)), tuple(digests)


def _norms(parameter: torch.nn.Parameter) -> tuple[str, str, str]:
    """A parameter's shape, norm and gradient's norm."""
    if torch.nn.parameter.is_lazy(parameter):
        return "not known yet", "", ""
    shape = "×".join(map(str, parameter.shape)) or "scalar"
    if not parameter.requires_grad:
        return shape, _norm_text(parameter), "frozen"
    gradient = "none" if parameter.grad is None else _norm_text(parameter.grad)
    return shape, _norm_text(parameter), gradient


def _norm_text(tensor: torch.Tensor) -> str:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    try:
        return f"{_norm(local.detach()):.6g}"
    except RuntimeError:  # torch lacks it for some layouts and dtypes
        return "?"


@torch.no_grad()
def _statistics(tensor: torch.Tensor) -> str:
    """One line: form, minimum, maximum, mean, norm, NaNs, infinities and histogram."""
    shape = "×".join(map(str, tensor.shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    form = f"{dtype} {shape} {tensor.device}"
    if tensor.layout != torch.strided or tensor.is_complex():
        return form
    numbers = tensor.reshape(-1)
    if tensor.dtype == torch.float16 or not tensor.is_floating_point():
        numbers = numbers.to(
            torch.float64 if numbers.numel() < 2**20 else torch.float32
        )
    elif tensor.element_size() < 4:
        numbers = numbers.float()
    nans, infinities = numbers.isnan().sum().item(), numbers.isinf().sum().item()
    finite = numbers[numbers.isfinite()] if nans or infinities else numbers
    counts = f"{nans} nan, {infinities} inf"
    if not finite.numel():
        return f"{form}, {counts}"
    low, high = (each.item() for each in finite.aminmax())
    mean = finite.mean(dtype=torch.float64).item()
    norm = torch.linalg.vector_norm(finite, dtype=torch.float64).item()
    bars = ""
    if low < high:
        histogram = torch.histc(finite, HISTOGRAM_BINS, low, high).tolist()
        bars = "  " + "".join(
            BARS[math.ceil(each / max(histogram) * (len(BARS) - 1))]
            for each in histogram
        )
    return (
        f"{form}, min {low:.6g}, max {high:.6g}, mean {mean:.6g}, norm {norm:.6g}, "
        f"{counts}{bars}"
    )


def digest_of(name: str, value: object, deadline: Deadline) -> tuple[str, str]:
    """A value's digest, and why it cannot be compared; "" if it can.

    Two values are equal, bit for bit, if both can be compared and the digests agree.

    Raises:
        TooSlow: The deadline has passed.
    """
    try:
        leaves = leaves_of(name, value, deadline)
        digests = digests_of(leaves, deadline)
    except (MemoryError, RuntimeError) as error:
        return "", text_of(error)
    why = ""
    for leaf, digest in zip(leaves, digests, strict=True):
        if isinstance(digest, str):
            why = digest if leaf.name == name else f"{leaf.name}: {digest}"
            break
    return combined(leaves, digests).hex(), encodable(why)


def _is_large(value: object) -> bool:
    """Whether a tensor or array is too large for the first round."""
    with contextlib.suppress(Exception):  # a subclass may lack a size
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return int(value.nbytes) > FIRST_ROUND_BYTES
    return False


def _described(name: str, value: Any, limit_s: float) -> tuple[Variable, bool]:
    """A variable, and whether a part of its description is missing for lack of time."""
    end = time.monotonic() + limit_s
    text, digest, late = "", "", False
    try:
        digest, why = _aside.call(_digest, name, value, limit_s=limit_s)
        text = _aside.call(_text, value, limit_s=end - time.monotonic())
    except TooSlow as error:
        late = True
        if digest:
            text = f"<repr takes longer than {limit_s:.2g} s>"
        else:
            why = str(error)
    except Exception as error:  # noqa: BLE001 - one odd object must not hide the others
        why = encodable(str(error)) or type(error).__name__
    kind = type(value).__name__
    return Variable(name, kind, *_form(value), text, digest, why), late


def _digest(name: str, value: Any, limit_s: float) -> tuple[str, str]:
    with _stream_of_its_own():
        return digest_of(name, value, Deadline(limit_s))


def _form(value: Any) -> tuple[tuple[int, ...] | None, str, str]:
    """(shape, dtype, device), as far as a value has them."""
    with contextlib.suppress(Exception):  # a subclass may do anything
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return tuple(value.shape), dtype, str(value.device)
        if isinstance(value, np.ndarray):
            return value.shape, str(value.dtype), ""
        if is_dataframe(value):
            return tuple(value.shape), "", ""
    return None, "", ""


def _text(value: Any, limit_s: float) -> str:
    """A short text of a value, or the norm of a tensor or array."""
    with _stream_of_its_own():
        return _text_of(value)


def _text_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _norm_of_tensor(value.detach())
    if isinstance(value, np.ndarray):
        return _norm_of_array(value)
    if isinstance(value, torch.nn.Module):
        parameters = sum(p.numel() for p in value.parameters())
        return f"{type(value).__name__}, {parameters:,} parameters"
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


def _norm_of_tensor(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "no values"
    if tensor.layout in SPARSE:
        if tensor.layout == torch.sparse_coo and not tensor.is_coalesced():
            return f"sparse, {tensor._nnz():,} values, some perhaps of one index"
        values = tensor.values()
        return f"sparse, {values.numel():,} values, {_norm_of_tensor(values)}"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.numel() == 1:
        return (
            f"{tensor.item():.6g}" if tensor.dtype != torch.bool else str(tensor.item())
        )
    norm = _norm(tensor)
    if math.isfinite(norm):
        return f"norm {norm:.6g}"
    if tensor.element_size() == 1:
        tensor = tensor.float()
    nans, infinities = tensor.isnan().sum().item(), tensor.isinf().sum().item()
    return _norm_with_counts(norm, nans, infinities)


def _norm_with_counts(norm: float, nans: float, infinities: float) -> str:
    """A norm that is no finite number, and why."""
    return f"norm {norm:.6g} ({nans} nan, {infinities} inf)"


def _norm(tensor: torch.Tensor) -> float:
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch has no arithmetic for 8-bit floats
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    flat = tensor.reshape(-1)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        flat = flat.to(wide)
    return float(torch.linalg.vector_norm(flat, dtype=wide).item())


def _norm_of_array(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind not in "biufc":
        return ""
    if array.size == 1:
        return f"{array.item():.6g}" if array.dtype.kind in "iuf" else str(array.item())
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    norm = float(np.linalg.norm(array.ravel().astype(wide)))
    if math.isfinite(norm):
        return f"norm {norm:.6g}"
    return _norm_with_counts(norm, np.isnan(array).sum(), np.isinf(array).sum())


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Let this thread run soon after it has waited for the GIL."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _stream_of_its_own() -> Iterator[None]:
    """On the GPU of a busy rank, do not wait for the kernels that its cell has queued.

    One of them may wait for another rank.
    """
    rank = this_rank()
    device = torch.device(rank.info.device)
    if device.type != "cuda" or not torch.cuda.is_initialized():
        yield
        return
    torch.cuda.set_device(device)
    if rank.activity is None:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


class _Aside:
    """Calls functions in a thread of its own, which is left behind if one is slow."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None]] | None = None
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[..., T], *args: Any, limit_s: float) -> T:
        """The result of `function(*args, limit_s)`.

        Raises:
            TooSlow: It took longer. TooSlow is also raised in the function, if it runs
                Python code.
        """
        if limit_s <= 0:
            raise TooSlow("there is no time left for it")
        if self._tasks is None or self._thread is None or not self._thread.is_alive():
            self._tasks = SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(self._tasks,), name="nbdist-look", daemon=True
            )
            self._thread.start()
        future: Future[T] = Future()

        def task() -> None:
            try:
                future.set_result(function(*args, limit_s))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                future.set_exception(error.with_traceback(None))

        self._tasks.put(task)
        del task
        if not wait([future], limit_s + GRACE_S).done:
            self._leave()
            raise TooSlow(f"it takes longer than {limit_s:.2g} s")
        return future.result()

    def _leave(self) -> None:
        assert self._thread is not None
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TooSlow))
        self._thread = self._tasks = None


def _work(tasks: SimpleQueue[Callable[[], None]]) -> None:
    with contextlib.suppress(TooSlow):
        while True:
            task = tasks.get()
            task()
            del task  # it refers to the user's value


_aside = _Aside()
