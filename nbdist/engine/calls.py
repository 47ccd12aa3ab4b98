"""Calls functions for the notebook, and moves values between notebook and rank.

Pickling, unpickling and printing a value can run user code, such as `__reduce__`. Such
code runs in the main thread, where it can be interrupted.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
from collections.abc import Awaitable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from nbdist.engine import ddp_modules, in_flight
from nbdist.engine.evaluation import evaluate, looking_at
from nbdist.engine.rank import this_rank
from nbdist.engine.torch_settings import adopt_settings, settings
from nbdist.engine.user_code import step, transfer_step
from nbdist.engine.user_variables import user_variables
from nbdist.engine.value_digest import digest_in_full
from nbdist.engine.value_text import in_full
from nbdist.errors import TransferError, text_of
from nbdist.ipc import serialization, shm_payload, worker_pickling
from nbdist.training import replicas
from nbdist.training.leaves import Deadline
from nbdist.wire import Comparison, RankInfo, Shown

__all__ = [
    "adopt_variables",
    "call",
    "compare",
    "export_variables",
    "fetch",
    "greet",
    "show",
    "store",
]

VARIABLE_LIMIT_S = 5.0
"""Seconds that one variable may take to travel to a new rank."""
TOTAL_LIMIT_S = 20.0
"""Seconds that all variables may take: to pickle on one rank, or to unpickle on the
other."""
OWN_NAMES = ("rank", "world_size", "local_rank", "device")
"""Names of a cell whose values differ between ranks."""
COMPARISON_LIMIT_S = 10.0
"""Seconds after which an expression's value is shown without a comparison."""


def greet() -> RankInfo:
    """What this rank is, after a message to those that follow its output."""
    rank = this_rank()
    rank.shell.kernel._publish_status("busy", "shell")
    return rank.info


# -- functions and single values -------------------------------------------------------


async def call(payload: Sequence[bytes]) -> shm_payload.Shipment:
    """Call a function that was sent as (function, args, kwargs); its packed result."""
    rank = this_rank()
    name = rank.activity.what if rank.activity else "call"
    with rank.output.during(name), ExitStack() as stack:
        with rank.interrupts.armed():  # once, because each time takes 20 µs
            with transfer_step("unpickling the function and its arguments"):
                function, args, kwargs = serialization.loads(
                    [bytearray(frame) for frame in payload]
                )
            stack.enter_context(worker_pickling.sharing(function))
            value = function(*args, **kwargs)
            if not inspect.isawaitable(value):
                return _result(value)
        return _result(await _interruptible(value))


def _result(value: object) -> shm_payload.Shipment:
    """A function's result, packed.

    Raises:
        BaseException: That of an asynchronous call for which nobody has waited.
    """
    unseen = in_flight.unseen_error()
    if unseen is not None:
        raise unseen[0]
    return _packed("the result", value)


def store(shipment: shm_payload.Shipment) -> None:
    """Put values from the notebook into this rank's namespace: all of them, or none."""
    rank = this_rank()
    with _keeping_own_names():
        values = serialization.loads_named(
            shm_payload.frames_of(shipment),
            lambda name: transfer_step(f"unpickling {name!r}"),
        )
    with step("replacing the variables of these names"):  # their `__del__` runs
        rank.shell.push(values)


def fetch(expression: str) -> shm_payload.Shipment:
    """An expression's value, packed for the notebook."""
    try:
        value = _evaluate(expression)
    except NameError as error:
        raise TransferError(str(error)) from error
    return _packed(repr(expression), value)


def show(expression: str) -> Shown:
    """An expression's value, as of `in_full`, and its digest.

    If the value has an image, the digest is the image's. The object behind it may hold
    what differs between ranks and is not seen.
    """
    with looking_at(expression):
        return _shown(expression)


def _shown(expression: str) -> Shown:
    value = _evaluate(expression)
    with step(f"printing {expression!r}"):
        text, rows, image = in_full(value, Deadline(COMPARISON_LIMIT_S))
    if image:
        return Shown(text, hashlib.sha256(image.encode()).hexdigest(), "", rows, image)
    with step(f"comparing {expression!r}"):
        deadline = Deadline(COMPARISON_LIMIT_S)
        digest, why = digest_in_full(expression, value, deadline)
    return Shown(text, digest, why, rows)


def compare(expression: str) -> Comparison:
    """Compare an expression's values with those of the other ranks, leaf by leaf."""
    value, error = None, ""
    with looking_at(expression):
        try:
            value = _evaluate(expression)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait for this one
            error = text_of(raised)
        with step(f"comparing {expression!r}"):
            return replicas.compare(expression, value, error)


async def _interruptible(value: Awaitable[Any]) -> Any:
    """Await a value. SIGINT raises KeyboardInterrupt in the coroutine."""
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
    with step(f"evaluating {expression!r}"):
        return evaluate(expression)


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
            f"pickled ({why}): fetch a part of it, such as a state_dict() or a plain "
            "attribute"
        ) from error


# -- all variables of a rank, for one that has joined ----------------------------------
#
# The other ranks wait meanwhile, so a variable that takes too long is left out.


def export_variables(
    skip: Collection[str] = (),
) -> tuple[shm_payload.Shipment, dict[str, str], tuple[int, int], dict[str, Any]]:
    """Pack the user's variables that can be pickled in time.

    They are pickled together, so that an optimizer still refers to its model's
    parameters.

    Args:
        skip: Names that are left out.

    Returns:
        The variables, the reason for each one that could not be packed, by name, this
        rank's `Recorder.position`, and its settings of torch.

    Raises:
        TransferError: It was interrupted; the message names the step.
    """
    limits = _TimeLimits("pickle")
    rank = this_rank()
    namespace = rank.shell.user_global_ns
    good = {name: v for name, v in user_variables().items() if name not in skip}
    bad: dict[str, str] = {}
    for name, value in list(good.items()):
        try:
            with limits.step(name):
                serialization.dumps(value, namespace)
        except _CannotTravel as error:
            del good[name]
            bad[name] = str(error)
    while True:
        try:
            frames = serialization.dumps_named(good, namespace, limits.step)
        except _CannotTravel as error:  # it could be pickled alone, but not with others
            del good[limits.name]
            bad[limits.name] = str(error)
        else:
            shipment = shm_payload.load(frames, rank.run_dir)
            return shipment, bad, rank.recorder.position, settings()


def adopt_variables(
    shipment: shm_payload.Shipment,
    position: tuple[int, int],
    torch_settings: dict[str, Any],
) -> tuple[str, str] | None:
    """Take the variables of another rank, all of them or none, and its settings.

    Args:
        shipment, position, torch_settings: As `export_variables` returns them. The
            steps of the values that this rank logs continue there, so that the monitor
            shows the ranks at the same steps.

    Returns:
        None if all were taken; else the name of a variable that could not be unpickled
        in time, and the reason.

    Raises:
        TransferError: It was interrupted; the message names the step.
    """
    limits = _TimeLimits("unpickle")
    rank = this_rank()
    try:
        with _keeping_own_names():
            frames = shm_payload.frames_of(shipment)
            values = serialization.loads_named(frames, limits.step)
    except _CannotTravel as error:
        return limits.name, str(error)
    ddp_modules.settle()
    rank.shell.push(values)
    rank.recorder.continue_from(position)
    adopt_settings(torch_settings)
    return None


@contextmanager
def _keeping_own_names() -> Iterator[None]:
    """Keep the names of every cell, such as `rank`, while values are unpickled.

    A function from another process brings the globals that it uses.
    """
    namespace = this_rank().shell.user_global_ns
    own = {name: namespace[name] for name in OWN_NAMES if name in namespace}
    try:
        yield
    finally:
        namespace.update(own)


class _CannotTravel(TransferError):
    """A variable is left out; the message gives the reason, without its name."""


class _TimeLimits:
    """Limits the time of each variable, and of all variables together."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._end = time.monotonic() + TOTAL_LIMIT_S
        self.name = ""
        """The variable that was started last."""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.name = name
        left = self._end - time.monotonic()
        if left <= 0:
            raise _CannotTravel(f"all variables together took {TOTAL_LIMIT_S:g} s")
        limit_s = min(left, VARIABLE_LIMIT_S)
        try:
            with transfer_step(f"{self._verb[:-1]}ing {name!r}", limit_s):
                yield
        except KeyboardInterrupt as interrupt:
            # A rank that is paused in an elastic run answers with an error only.
            raise TransferError(f"interrupted {interrupt}") from None
        except TransferError as error:
            if error.__cause__ is None:
                why = f"did not {self._verb} within {limit_s:.2g} s"
                raise _CannotTravel(why) from None
            raise _CannotTravel(text_of(error.__cause__)) from error
