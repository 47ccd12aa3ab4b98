"""A rank's variables, each described by a few plain values and a digest."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch

from nbdist.engine import control_handlers
from nbdist.engine.evaluation import evaluate, looking_at
from nbdist.engine.live_tensors import live_tensors
from nbdist.engine.rank import this_rank
from nbdist.engine.user_variables import user_variables
from nbdist.engine.value_digest import digest_in_full, digest_of
from nbdist.engine.value_text import in_full, short_text
from nbdist.errors import encodable, text_of
from nbdist.ipc.gpu_threads import own_stream, use_gpu
from nbdist.ipc.locks import Future, await_all
from nbdist.ipc.own_memory import Unreadable
from nbdist.training.digest import digests_of
from nbdist.training.leaves import (
    Deadline,
    TooSlow,
    is_dataframe,
    leaves_of,
    name_of_kind,
)
from nbdist.training.replicas import described_leaves
from nbdist.wire import LeafDigest, MemoryReport, Shown, Variable

__all__ = [
    "leaves",
    "look",
    "memory_report",
    "variables",
]

T = TypeVar("T")

UNINTERESTING = (types.ModuleType, types.FunctionType, type)
IDLE_LIMITS_S = 2.0, 8.0
BUSY_LIMITS_S = 1.0, 1.5
"""Seconds for one variable, and for all, on a rank that is idle, or busy."""
LOOK_LIMIT_S = 5.0
"""Seconds for an expression. A busy machine gives a thread that looks little time."""
FIRST_ROUND_S = 0.05
FIRST_ROUND_BYTES = 8 << 20
"""What takes longer, or is larger, has its turn after all others."""
INSIST_S = 0.05
MOST_RAISED = 200
"""How often TooSlow is raised in a thread that was left behind, every `INSIST_S`."""
GRACE_S = 0.02
"""Seconds within which a function that looks at its deadline ends by itself."""
REASON_LIMIT = 100
SWITCH_S = 0.0002
"""Seconds after which a busy thread lets the thread that looks run.

Python's 5 ms pass at each operation of torch, which releases the GIL. A model has
hundreds of tensors.
"""


def variables(pattern: str = "*") -> list[Variable]:
    """The user's variables whose names match a shell pattern, by name.

    The caller is another thread than the main one, which may be changing the values: a
    tensor may be read in the middle of an update. A variable that takes too long has no
    value and is not compared; the others are described.
    """
    rank = this_rank()
    each_s, all_s = BUSY_LIMITS_S if rank.activity else IDLE_LIMITS_S
    end = time.monotonic() + all_s
    chosen = {
        name: value
        for name, value in user_variables().items()
        if fnmatch.fnmatchcase(name, pattern)
        and not issubclass(type(value), UNINTERESTING)
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
    value that takes too long becomes the text. What cannot be compared in time has its
    text.
    """
    found: list[Shown] = []
    try:
        with _quick_switches():
            _aside.call(_look, expression, found, limit_s=LOOK_LIMIT_S)
    except Exception as error:  # noqa: BLE001 - a user's expression may raise anything
        why = text_of(error)
        found = found or [Shown(f"<{why}>", "", why)]
    return found[-1]


def _look(expression: str, found: list[Shown], limit_s: float) -> None:
    """Append the value's text, and then the text with its digest."""
    deadline = Deadline(limit_s)
    with _stream_of_its_own(), looking_at(expression):
        value = evaluate(expression)
        text, rows, _no_image = in_full(value, deadline, images=False)
        found.append(Shown(text, "", "it takes too long", rows))
        digest, why = digest_in_full(expression, value, deadline)
        found.append(Shown(text, digest, why, rows))


def leaves(expression: str) -> tuple[list[LeafDigest], str]:
    """The leaves of an expression's value, on a rank whose main thread may be busy.

    The expression is evaluated as in `look`.

    Returns:
        The leaves, and why there are none; "" if there are.
    """
    try:
        with _quick_switches():
            return _aside.call(_leaves, expression, limit_s=LOOK_LIMIT_S), ""
    except Exception as error:  # noqa: BLE001 - a user's expression may raise anything
        return [], encodable(text_of(error))


def _leaves(expression: str, limit_s: float) -> list[LeafDigest]:
    deadline = Deadline(limit_s)
    with _stream_of_its_own(), looking_at(expression):
        value = evaluate(expression)
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


def _is_large(value: object) -> bool:
    """Whether a tensor or array is too large for the first round."""
    with contextlib.suppress(Exception):  # a subclass may lack a size
        if _is_numeric(value):
            return int(value.nbytes) > FIRST_ROUND_BYTES  # type: ignore[attr-defined]
    return False


def _is_numeric(value: object) -> bool:
    return issubclass(type(value), (torch.Tensor, np.ndarray))


@dataclass
class _Row:
    """What is known so far of a variable."""

    shape: tuple[int, ...] | None = None
    dtype: str = ""
    device: str = ""
    text: str | None = None
    digest: str = ""
    why: str = ""
    """Why the value cannot be compared."""

    def fill(self, name: str, value: Any, limit_s: float) -> None:
        """Find out all; what is found before an error or the time limit stays.

        Any code of the user's may run: no error of it leaves, except the time limit's.
        """
        deadline = Deadline(limit_s)
        with _stream_of_its_own():
            for step in self._steps(value):
                try:
                    step(self, name, value, deadline)
                except TooSlow:
                    raise
                except BaseException as error:  # noqa: BLE001 - see above
                    self.why = self.why or _reason(error)

    @staticmethod
    def _steps(value: object) -> list[Callable[[_Row, str, Any, Deadline], None]]:
        # The norm of a tensor is bounded in bytes, and a digest is not.
        if _is_numeric(value):
            return [_Row._form, _Row._text, _Row._digest]
        return [_Row._form, _Row._digest, _Row._text]

    def _form(self, name: str, value: Any, deadline: Deadline) -> None:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            self.dtype = encodable(str(value.dtype)).removeprefix("torch.")
            self.device = encodable(str(value.device))
            self.shape = _sizes(value.shape)
        elif issubclass(kind, np.ndarray):
            self.shape, self.dtype = _sizes(value.shape), encodable(str(value.dtype))
        elif is_dataframe(value):
            self.shape = _sizes(value.shape)

    def _text(self, name: str, value: Any, deadline: Deadline) -> None:
        try:
            self.text = short_text(value, deadline)
        except TooSlow:
            raise
        except BaseException as error:  # noqa: BLE001 - shown in the place of the text
            self.text = f"<cannot be shown: {_reason(error)}>"

    def _digest(self, name: str, value: Any, deadline: Deadline) -> None:
        self.digest, self.why = digest_of(name, value, deadline)


def _described(name: str, value: Any, limit_s: float) -> tuple[Variable, bool]:
    """A variable, and whether a part of its description is missing for lack of time."""
    row, late = _Row(), ""
    try:
        _aside.call(row.fill, name, value, limit_s=limit_s)
    except TooSlow as error:
        late = str(error)
    text = row.text
    if text is None:
        text = (
            f"<repr takes longer than {limit_s:.2g} s>" if row.digest or row.why else ""
        )
    return Variable(
        name,
        name_of_kind(value),
        row.shape,
        row.dtype,
        row.device,
        text,
        row.digest,
        row.why or ("" if row.digest else late),
    ), bool(late)


def _sizes(shape: Any) -> tuple[int, ...]:
    """A shape whose numbers are of class `int`, as only they are surely picklable."""
    return tuple(int(size) for size in shape)


def _reason(error: BaseException) -> str:
    if isinstance(error, Unreadable):
        return str(error)
    text = " ".join(text_of(error).split())
    return text if len(text) <= REASON_LIMIT else f"{text[: REASON_LIMIT - 1]}…"


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
    use_gpu(device)
    if rank.activity is None:
        yield
        return
    with torch.cuda.stream(own_stream(device)):
        yield


class _Aside:
    """Calls functions in a thread of its own, which is left behind if one is slow."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] | None = None
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[..., T], *args: Any, limit_s: float) -> T:
        """The result of `function(*args, limit_s)`.

        Raises:
            TooSlow: It took longer. TooSlow is also raised in the function, if it runs
                Python code, until it ends.
            RuntimeError: It raised what is no Exception, such as SystemExit.
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
        if not await_all([future], limit_s + GRACE_S):
            self._leave()
            raise TooSlow(f"it takes longer than {limit_s:.2g} s")
        error = future.exception()
        if error is None or isinstance(error, Exception):
            return future.result()
        # The user's code may raise SystemExit, which must not end this thread.
        raise RuntimeError(text_of(error)) from error

    def _leave(self) -> None:
        thread, tasks = self._thread, self._tasks
        assert thread is not None
        assert tasks is not None
        self._thread = self._tasks = None
        tasks.put(None)  # for the thread whose function ends by itself
        threading.Thread(
            target=_end, args=(thread,), name="nbdist-look-end", daemon=True
        ).start()


def _end(thread: threading.Thread) -> None:
    """Raise TooSlow in a thread until it ends: user code may catch it.

    For example, `reprlib` catches what an item raises, and goes on with the next item.
    """
    ident = ctypes.c_ulong(thread.ident or 0)
    for _ in range(MOST_RAISED):
        if not thread.is_alive():
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TooSlow))
        thread.join(INSIST_S)


def _work(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    with contextlib.suppress(TooSlow):
        while (task := tasks.get()) is not None:
            task()
            del task  # it refers to the user's value


_aside = _Aside()
