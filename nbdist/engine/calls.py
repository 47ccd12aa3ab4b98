"""Functions and values from the notebook, on the main thread of a rank.

Whatever of the user's runs here, such as the `__reduce__` of a value, is interruptible.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from typing import Any

from nbdist.engine.rank import this_rank
from nbdist.engine.user_code import step, transfer_step
from nbdist.errors import TransferError, encodable, text_of
from nbdist.ipc import serialization, shm_payload

__all__ = ["call", "fetch", "show", "store"]


async def call(payload: Sequence[bytes]) -> shm_payload.Shipment:
    """Call a function that travelled as (function, args, kwargs); its packed result."""
    rank = this_rank()
    with transfer_step("unpickling the function and its arguments"):
        function, args, kwargs = serialization.loads(
            [bytearray(frame) for frame in payload]
        )
    name = getattr(function, "__name__", "call")
    with rank.output.during(name):
        with rank.interrupts.armed():
            value = function(*args, **kwargs)
        if inspect.isawaitable(value):
            value = await _interruptible(value)
    return _packed("the result", value)


def store(shipment: shm_payload.Shipment) -> None:
    """Put values from the notebook into this rank's namespace: all, or none."""
    rank = this_rank()
    values = serialization.loads_named(
        shm_payload.frames_of(shipment),
        lambda name: transfer_step(f"unpickling {name!r}"),
    )
    with step("replacing the variables of these names"):  # their `__del__` runs
        rank.shell.push(values)
    # A function from another rank brings the globals that it uses, `rank` among them.
    rank.tell_namespace()


def fetch(expression: str) -> shm_payload.Shipment:
    """An expression's value, packed for the notebook."""
    try:
        value = _evaluate(expression)
    except NameError as error:
        raise TransferError(str(error)) from error
    return _packed(repr(expression), value)


def show(expression: str) -> str:
    """An expression's value as IPython would print it."""
    value = _evaluate(expression)
    with step(f"printing {expression!r}"):
        bundle, _metadata = this_rank().shell.display_formatter.format(value)
        # Without a text, IPython has kept to itself what `repr` raises.
        return encodable(bundle.get("text/plain") or repr(value))


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
    shell = this_rank().shell
    with step(f"evaluating {expression!r}"):
        return eval(expression, shell.user_global_ns, shell.user_ns)


def _packed(what: str, value: object) -> shm_payload.Shipment:
    rank = this_rank()
    try:
        with transfer_step(f"pickling {what}"):
            return shm_payload.load(serialization.dumps(value), rank.run_dir)
    except TransferError as error:
        why = text_of(error.__cause__ or error)
        kind = type(value)
        raise TransferError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, which cannot be "
            f"pickled ({why}): fetch what you need of it, such as a state_dict() or a "
            "plain attribute"
        ) from error
