"""Runs a notebook's cell on this rank, as IPython does."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from nbdist.collectives.torch_backend.process_group import original_error
from nbdist.engine import cell_names
from nbdist.engine.interrupts import Interrupts
from nbdist.engine.rank import this_rank
from nbdist.engine.user_code import end_forked_child
from nbdist.errors import CollectiveAborted, encodable, message_of
from nbdist.wire import Failure

__all__ = ["CellReply", "arm", "run_cell"]

CellReply = tuple[Failure | None, float]
"""The failure, if any, and the seconds that the cell took."""


async def run_cell(code: str, number: int) -> CellReply:
    """Run a cell with its magics, `!`, top-level await and displayed last expression.

    Args:
        code: The cell, with one comment line where the notebook has `%%distributed`,
            so that line numbers are the notebook's.
        number: The notebook's In[] number, used in tracebacks and for Out[].
    """
    rank = this_rank()
    rank.shell.execution_count = number
    start = time.perf_counter()
    with rank.output.during(f"In[{number}]"):
        failure = _failure(await _run_to_result(code))
        _show_pages(rank.shell)
    return failure, time.perf_counter() - start


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


def _failure(result: Any) -> Failure | None:
    info = this_rank().info
    if isinstance(result, BaseException):
        return Failure(info.rank, info.host, "KeyboardInterrupt", "")
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return None
    location = cell_names.last_line(error)
    # DDP's backward is C++ and changes the class of an error that passes through it.
    error = original_error(error)
    name = type(error).__name__
    if isinstance(error, asyncio.CancelledError):
        name = "KeyboardInterrupt"
    shell = this_rank().shell
    return Failure(
        info.rank,
        info.host,
        name,
        message_of(error),
        location,
        tuple(map(encodable, getattr(shell, "_last_traceback", None) or ())),
    )
