"""Functions and values from the notebook, on the main thread of a rank."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from nbdist.engine import codec, shipping
from nbdist.engine.rank import this_rank
from nbdist.errors import TransferError

__all__ = ["call", "fetch", "show", "store"]


async def call(payload: list[Any]) -> Any:
    """Call a function that travelled as (function, args, kwargs)."""
    rank = this_rank()
    function, args, kwargs = codec.loads(payload)
    with rank.output.during(getattr(function, "__name__", "call")):
        with rank.interrupts.armed():
            value = function(*args, **kwargs)
        if inspect.isawaitable(value):
            value = await _interruptible(value)
    try:
        codec.dumps(value)
    except Exception as error:
        raise _cannot_travel("the result", value, error) from error
    return value


def store(shipment: shipping.Shipment) -> None:
    """Put values from the notebook into this rank's namespace."""
    rank = this_rank()
    rank.shell.push(shipping.unload(shipment))
    # A function from another rank brings the globals that it uses, `rank` among them.
    rank.tell_namespace()


def fetch(expression: str) -> shipping.Shipment:
    """An expression's value, packed for the notebook."""
    try:
        value = _evaluate(expression)
    except NameError as error:
        raise TransferError(f"on rank {this_rank().info.rank}: {error}") from error
    try:
        frames = codec.dumps(value)
    except Exception as error:
        raise _cannot_travel(repr(expression), value, error) from error
    return shipping.load(frames, Path(os.environ["NBDIST_RUN_DIR"]))


def show(expression: str) -> str:
    """An expression's value as IPython would print it."""
    shell = this_rank().shell
    bundle, _metadata = shell.display_formatter.format(_evaluate(expression))
    return str(bundle.get("text/plain", ""))


async def _interruptible(value: Awaitable[Any]) -> Any:
    """What it awaits to; SIGINT reaches it as it reaches a function."""
    task = asyncio.ensure_future(_caught(value))
    with this_rank().interrupts.armed(task):
        try:
            result, interrupt = await task
        except asyncio.CancelledError:
            interrupt = KeyboardInterrupt()
    if interrupt is not None:
        raise interrupt
    return result


async def _caught(value: Awaitable[Any]) -> tuple[Any, KeyboardInterrupt | None]:
    # A KeyboardInterrupt must not leave the task: asyncio would pass it to the loop.
    try:
        return await value, None
    except KeyboardInterrupt as interrupt:
        return None, interrupt


def _evaluate(expression: str) -> Any:
    rank = this_rank()
    with rank.interrupts.armed():
        return eval(expression, rank.shell.user_global_ns, rank.shell.user_ns)


def _cannot_travel(what: str, value: object, error: Exception) -> TransferError:
    kind = type(value)
    return TransferError(
        f"{what} on rank {this_rank().info.rank} is a "
        f"{kind.__module__}.{kind.__qualname__}, which cannot be pickled ({error}): "
        "fetch what you need of it, such as a state_dict() or a plain attribute"
    )
