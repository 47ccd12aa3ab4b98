"""Runs a notebook's cell on this rank, as IPython does."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import time
from collections.abc import Iterator
from typing import Any

from IPython.core.magics.execution import ExecutionMagics

from nbdist.collectives.torch_backend.process_group import original_error
from nbdist.engine import cell_names, cuda_context, profiler, torch_group, world
from nbdist.engine.interrupts import Interrupts
from nbdist.engine.rank import this_rank
from nbdist.engine.user_code import end_forked_child
from nbdist.errors import CollectiveAborted, CollectiveTimeout, encodable, message_of
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
"""What the last cell has raised."""


async def run_cell(code: str, number: int) -> CellReply:
    """Run a cell with its magics, `!`, top-level await and displayed last expression.

    Args:
        code: The cell, with one comment line where the notebook has `%%distributed`,
            so that line numbers are the notebook's.
        number: The notebook's In[] number, used in tracebacks and for Out[].
    """
    global _last_error
    rank = this_rank()
    rank.shell.execution_count = number
    start = time.perf_counter()
    release_variables_of_failure()
    rank.released = None
    with rank.output.during(f"In[{number}]"):
        with profiler.profiled():
            result = await _run_to_result(code)
        _last_error = _error_of(result)
        failure = release_failure() or _failure(result)
        _show_pages(rank.shell)
    if failure is not None:
        world.current().note_failure()
    return failure, time.perf_counter() - start


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

    An interrupt or an exit gets no traceback, because it explains nothing. Formatting a
    traceback of forty frames can take longer than the notebook waits.
    """
    run_code = shell.run_code

    async def run_armed(
        code_obj: Any, result: Any = None, *, async_: bool = False
    ) -> bool:
        with interrupts.armed(asyncio.current_task() if async_ else None):
            failed: bool = await run_code(code_obj, result, async_=async_)
        return failed

    shell.run_code = run_armed
    _print_traceback_on_tb(shell)
    show = shell.showtraceback

    def show_unless_interrupted(*args: Any, **options: Any) -> None:
        if _is_interrupt(sys.exc_info()[1]):
            shell._last_traceback = None
        else:
            show(*args, **options)

    def as_shown(error: BaseException, *_: Any, **options: Any) -> dict[str, Any]:
        lines = list(getattr(shell, "_last_traceback", None) or ())
        message = message_of(error)
        return {"ename": type(error).__name__, "evalue": message, "traceback": lines}

    shell.showtraceback = show_unless_interrupted
    # IPython 9 formats each traceback a second time, for `%notebook`.
    shell._format_exception_for_storage = as_shown


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


def _failure(result: Any) -> Failure | None:
    info = this_rank().info
    if isinstance(result, BaseException):
        return Failure(info.rank, info.host, "KeyboardInterrupt", "")
    error = _error_of(result)
    if error is None:
        return None
    location = cell_names.last_line(error)
    # DDP's backward is C++ and changes the class of an error that passes through it.
    error = original_error(error)
    name = type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        name = "KeyboardInterrupt"
    shell = this_rank().shell
    message = message_of(error)
    lines = [*map(encodable, getattr(shell, "_last_traceback", None) or ())]
    if advice := cuda_context.advice() or torch_group.advice(error):
        message, lines = f"{message}\n{advice}", [*lines, advice]
    return Failure(info.rank, info.host, name, message, location, tuple(lines))
