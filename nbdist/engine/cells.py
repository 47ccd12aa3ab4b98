"""Runs a notebook's cell on this rank, as IPython does."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.interactiveshell import ExecutionResult
from IPython.core.magics.execution import ExecutionMagics

from nbdist.collectives.torch_backend.process_group import original_error
from nbdist.engine import (
    cell_names,
    cuda_context,
    in_flight,
    profiler,
    torch_group,
    world,
)
from nbdist.engine.error_text import ErrorText, text_within_bounds
from nbdist.engine.interrupts import Interrupts
from nbdist.engine.rank import this_rank
from nbdist.engine.user_code import end_forked_child
from nbdist.errors import CollectiveAborted, CollectiveTimeout
from nbdist.wire import Failure

__all__ = [
    "CellReply",
    "arm",
    "last_error",
    "release_failure",
    "release_variables",
    "release_variables_of_failure",
    "run_cell",
]

CellReply = tuple[Failure | None, float]
"""The failure, if any, and the seconds that the cell took."""

GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of code whose frames live on between two calls."""
_last_error: BaseException | None = None
"""What has failed the last cell."""


class Shown(NamedTuple):
    """An error that IPython has shown on this rank."""

    error: BaseException
    text: ErrorText
    """Its lines are empty if they are part of the output."""
    location: str


class Tracebacks:
    """What IPython shows of errors while a cell runs.

    IPython also shows errors that it then drops, such as those of `%run`, of a nested
    `run_cell`, or of a `__repr__`. A rank that goes on after one leaves the others
    waiting, so they fail the cell.

    Args:
        result: The result of the cell; None until its code runs. Not that of a nested
            one.
    """

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.own: Shown | None = None
        """What the cell itself has raised."""
        self.dropped: Shown | None = None
        """The first error that IPython has dropped."""

    def is_own(self, error: BaseException) -> bool:
        """Whether it is the cell's, and not one that IPython then drops."""
        result = self.result
        return result is None or any(
            error is each for each in (result.error_in_exec, result.error_before_exec)
        )

    def keep(self, shown: Shown, *, is_dropped: bool) -> None:
        """Keep an error for the cell's failure; print one that is not the cell's."""
        if self.is_own(shown.error):
            self.own = shown
            return
        if shown.text.lines:
            print("\n".join(shown.text.lines), file=sys.stderr)
        if is_dropped and self.dropped is None:
            self.dropped = shown._replace(text=shown.text._replace(lines=[]))

    def of(self, result: Any) -> Shown | None:
        """What has failed the cell, by its result; None if nothing has."""
        error = _error_of(result)
        if self.own is not None and (error is None or error is self.own.error):
            return self.own
        if error is not None:
            return _shown(error, lambda _trace: [])
        return self.dropped


_tracebacks = Tracebacks(ExecutionResult(None))


async def run_cell(code: str, number: int) -> CellReply:
    """Run a cell with its magics, `!`, top-level await and displayed last expression.

    Args:
        code: The cell, with one comment line where the notebook has `%%distributed`,
            so that line numbers are the notebook's.
        number: The notebook's In[] number, used in tracebacks and for Out[].
    """
    global _last_error, _tracebacks
    rank = this_rank()
    _number_history(rank.shell, number)
    _tracebacks = Tracebacks()
    start = time.perf_counter()
    release_variables_of_failure()
    rank.released = None
    with rank.output.during(f"In[{number}]"):
        with profiler.profiled():
            result = await _run_to_result(code)
        shown = None if _is_stopped(result) else _tracebacks.of(result)
        _last_error = _error_of(result) or (shown and shown.error)
        failure = release_failure() or _failure(result, shown)
        failure = in_flight.with_unseen(failure)
        _tracebacks = Tracebacks(
            ExecutionResult(None)
        )  # between cells: errors are text
        _show_pages(rank.shell)
    if failure is not None:
        world.current().note_failure()
    return failure, time.perf_counter() - start


def _number_history(shell: Any, number: int) -> None:
    """Have a shell's history take the next cell under the notebook's number.

    The history is a list. It gets an empty text for each cell that has not run here,
    and ends before the number again when a new kernel has attached.
    """
    shell.execution_count = number
    history = shell.history_manager
    for cells in (history.input_hist_parsed, history.input_hist_raw):
        del cells[max(1, number) :]
        cells += [""] * (number - len(cells))


def last_error() -> BaseException | None:
    """The error of the last cell; None after a success, a function or a script."""
    return _last_error


def release_failure() -> Failure | None:
    """The failure of a cell that NCCL was too late for, or that was released from NCCL.

    What the cell has raised or computed after a release follows from it.

    Returns:
        None if neither was so.
    """
    rank = this_rank()
    if rank.released is None and (seconds := torch_group.late_s()):
        rank.released = CollectiveTimeout(
            f"a collective of NCCL has taken longer than its time-out of {seconds:g} s"
        )
    if rank.released is None:
        return None
    name = type(rank.released).__name__
    return Failure(rank.info.rank, rank.info.host, name, str(rank.released))


def release_variables_of_failure() -> None:
    """Release the local variables that the last cell's error keeps.

    IPython and `sys.last_value` keep the error. The error stays, with its lines.
    """
    global _last_error
    error, _last_error = _last_error, None
    if error is not None:
        release_variables(error)


def release_variables(error: BaseException) -> None:
    """Release the local variables of all functions that an error has left."""
    for each in _with_causes(error):
        trace = each.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            # A generator that has caught an earlier error may still be in use.
            if each is error or not frame.f_code.co_flags & GENERATORS:
                with contextlib.suppress(RuntimeError):  # some thread is in it
                    frame.clear()
                    _ = frame.f_locals  # before Python 3.13, updates a kept copy


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors that it follows from or consists of."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            parts = getattr(each, "exceptions", ())  # of an ExceptionGroup
            inner = [part for part in parts if isinstance(part, BaseException)]
            waiting += [each.__cause__, each.__context__, original_error(each), *inner]


def arm(shell: Any, interrupts: Interrupts) -> None:
    """Deliver SIGINT only while this IPython shell runs a cell's code.

    IPython's hooks, which run before and after that code, would drop an interrupt.

    What it shows of errors is kept for the failure of the cell, see `Tracebacks`.
    """
    run_code = shell.run_code

    async def run_armed(
        code_obj: Any, result: Any = None, *, async_: bool = False
    ) -> bool:
        if _tracebacks.result is None:
            _tracebacks.result = result
        with interrupts.armed(asyncio.current_task() if async_ else None):
            failed: bool = await run_code(code_obj, result, async_=async_)
        return failed

    shell.run_code = run_armed
    _print_traceback_on_tb(shell)
    _keep_tracebacks(shell)


def _keep_tracebacks(shell: Any) -> None:
    """Have a shell pass what it shows of errors to `_tracebacks`.

    An interrupt or an exit gets no traceback, because it explains nothing. Formatting a
    traceback of forty frames can take longer than the notebook waits.
    """
    show = shell.showtraceback
    formatted: list[str] | None = None
    is_forming = False

    def take(_kind: Any, error: BaseException, lines: list[str]) -> None:
        nonlocal formatted
        formatted = lines
        if not is_forming:  # IPython's `showsyntaxerror`
            shell._last_traceback = lines
            _tracebacks.keep(_shown(error, lambda _: lines), is_dropped=True)

    def keep(exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        kind, error, _ = exc_tuple or sys.exc_info()
        if error is None:  # IPython says so
            show(exc_tuple, *args, **options)
            return
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        # Who calls it outside of IPython has caught the error, as with `print_exc`.
        is_dropped = caller.partition(".")[0] == "IPython"
        is_interrupt = _is_interrupt(error)
        is_exit = isinstance(error, SystemExit)
        if is_interrupt and is_dropped and not (is_exit or _tracebacks.is_own(error)):
            raise error  # an interrupt ends the cell, and not only a part of it

        def form(frames: TracebackType | None) -> list[str]:
            if is_interrupt:
                return []
            if isinstance(error, IPythonUsageError):
                return [f"UsageError: {error}"]
            if any(hasattr(each, "exceptions") for each in _with_causes(error)):
                return traceback.format_exception(kind, error, frames)
            nonlocal formatted, is_forming
            formatted, is_forming = None, True
            try:
                show((kind, error, frames), *args, **options)
            finally:
                is_forming = False
            if formatted is None:  # it was interrupted, or could not be formatted
                return traceback.format_exception(kind, error, frames, chain=False)
            return formatted

        shell._last_traceback = None
        shown = _shown(error, form)
        shell._last_traceback = shown.text.lines or None
        _tracebacks.keep(shown, is_dropped=is_dropped)

    def as_shown(error: BaseException, *_: Any, **options: Any) -> dict[str, Any]:
        own = _tracebacks.own
        text = _shown(error, lambda _: []).text if own is None else own.text
        return {"ename": text.name, "evalue": text.message, "traceback": text.lines}

    shell._showtraceback = take
    shell.showtraceback = keep
    # IPython 9 formats each traceback a second time, for `%notebook`.
    shell._format_exception_for_storage = as_shown


def _shown(
    error: BaseException, form: Callable[[TracebackType | None], list[str]]
) -> Shown:
    text = text_within_bounds(error, error.__traceback__, form)
    return Shown(error, text, cell_names.last_line(error) or cell_names.line_now())


def _print_traceback_on_tb(shell: Any) -> None:
    """Make `%tb` print the last traceback.

    ipykernel publishes it as a cell's error, which a rank's reply has for the notebook.
    """

    def print_traceback(_kind: Any, _value: Any, parts: list[str]) -> None:
        print(shell.InteractiveTB.stb2text(parts))

    ipythons: Any = ExecutionMagics(shell)

    def tb(line: str) -> None:
        publishing = shell._showtraceback
        shell._showtraceback = print_traceback
        try:
            ipythons.tb(line)
        finally:
            shell._showtraceback = publishing

    shell.magics_manager.register_function(tb, "line", "tb")


def _is_interrupt(error: BaseException | None) -> bool:
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return True
    if not this_rank().interrupts.delivered:
        return False
    # An error can follow from the interrupt, as when a library cleans up after it.
    while error is not None:
        if isinstance(original_error(error), (KeyboardInterrupt, CollectiveAborted)):
            return True
        error = error.__cause__ or error.__context__
    return False


async def _run_to_result(code: str) -> Any:
    """IPython's result, or a KeyboardInterrupt where IPython itself was interrupted.

    IPython turns what user code raises into a result. A KeyboardInterrupt within its
    bookkeeping, and the cancellation of a coroutine, come out as exceptions.
    """
    result: Any
    try:
        result = await _run(code)
    except (KeyboardInterrupt, asyncio.CancelledError):
        result = KeyboardInterrupt("interrupted")
    end_forked_child(0 if getattr(result, "success", False) else 1)
    return result


async def _run(code: str) -> Any:
    rank = this_rank()
    shell = rank.shell
    transformed, error = _transform(shell, code)
    if not shell.should_run_async(
        code, transformed_cell=transformed, preprocessing_exc_tuple=error
    ):
        return shell.run_cell(code, store_history=True)
    # A task of its own, so that an interrupt can cancel it.
    return await asyncio.ensure_future(
        _run_async(shell, code, transformed_cell=transformed, error=error)
    )


async def _run_async(shell: Any, code: str, transformed_cell: str, error: Any) -> Any:
    # A KeyboardInterrupt must not leave the task: asyncio would pass it to the loop.
    try:
        result = await shell.run_cell_async(
            code,
            store_history=True,
            transformed_cell=transformed_cell,
            preprocessing_exc_tuple=error,
        )
    except KeyboardInterrupt as interrupt:
        return interrupt
    shell.events.trigger("post_execute")
    shell.events.trigger("post_run_cell", result)
    return result


def _show_pages(shell: Any) -> None:
    """Display what `name?` would show in a pager, which a rank does not have."""
    for payload in shell.payload_manager.read_payload():
        if payload.get("source") == "page":
            shell.display_pub.publish(payload["data"])
    shell.payload_manager.clear_payload()


def _transform(shell: Any, code: str) -> tuple[str, Any]:
    try:
        return shell.transform_cell(code), None
    except Exception as error:  # noqa: BLE001 - run_cell reports it as the cell's error
        return code, (type(error), error, error.__traceback__)


def _error_of(result: Any) -> BaseException | None:
    """The error of a result as `_run_to_result` returns it."""
    if isinstance(result, BaseException):
        return result
    error: BaseException | None = result.error_before_exec or result.error_in_exec
    return error


def _is_stopped(result: Any) -> bool:
    """Whether IPython itself was interrupted."""
    return isinstance(result, BaseException)


def _failure(result: Any, shown: Shown | None) -> Failure | None:
    info = this_rank().info
    if _is_stopped(result):
        return Failure(info.rank, info.host, "KeyboardInterrupt", "")
    if shown is None:
        return None
    error, (name, message, lines), location = shown
    # DDP's backward is C++ and changes the class of an error that passes through it.
    original = original_error(error)
    if original is not error:
        name, message, _ = text_within_bounds(original, None, lambda _: [])
    if isinstance(original, asyncio.CancelledError):
        name = "KeyboardInterrupt"
    if advice := cuda_context.advice() or torch_group.advice(original):
        message, lines = f"{message}\n{advice}", [*lines, advice]
    return Failure(info.rank, info.host, name, message, location, tuple(lines))
