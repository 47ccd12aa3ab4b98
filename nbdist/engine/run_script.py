"""Runs a script on this rank as `__main__`, as torchrun does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from nbdist.collectives.torch_backend.process_group import original_error
from nbdist.engine import (
    cell_names,
    in_flight,
    shared_default_group,
    start_method,
    world,
)
from nbdist.engine.cells import (
    CellReply,
    release_failure,
    release_variables,
    release_variables_of_failure,
)
from nbdist.engine.error_text import text_within_bounds
from nbdist.engine.rank import this_rank
from nbdist.engine.user_variables import user_variables
from nbdist.ipc import folders, roles
from nbdist.wire import Failure

__all__ = ["run_script"]

CHILD_END_S = 2.0
"""Seconds that the child processes of a failed script have to end after SIGTERM."""

_helpers: set[str] = set()
"""Names of the modules that the last script imported from its own folder."""


def run_script(
    path: str,
    args: Sequence[str],
    n_ps: int,
    keep: bool,
    restarts: int,
    max_restarts: int,
    is_module: bool = False,
) -> CellReply:
    """Run a script as `torchrun path *args` does, in the world of this rank.

    Args:
        path: The script's absolute path. Its folder comes first in `sys.path`.
        args: The rest of `sys.argv`.
        n_ps: The number of parameter servers in the environment; the last ranks.
        keep: Whether the notebook's cells get the script's variables, also when the
            script fails.
        restarts: How often the script has begun again, for its environment.
        max_restarts: How often it may.
        is_module: Whether `path` is the working folder joined with the name of a
            module, as of `python -m`.
    """
    rank = this_rank()
    variables = roles.environment(
        rank.info.rank, rank.info.world_size, n_ps, restarts, max_restarts
    )
    # What torch's `@record` writes.
    errors = rank.run_dir / f"{rank.info.name}.error-{restarts}.json"
    errors.unlink(missing_ok=True)
    variables["TORCHELASTIC_ERROR_FILE"] = str(errors)
    start = time.perf_counter()
    if is_module:
        path = os.path.join(os.getcwd(), path)
    name = Path(path).name
    release_variables_of_failure()
    rank.released = None
    with rank.output.during(name):
        module = _main_module(path)
        try:
            with ExitStack() as stack:
                _enter_environment(stack, module, path, args, n_ps, keep, variables)
                failure = _run(module, path, is_module)
                failure = release_failure() or failure
                failure = in_flight.with_unseen(failure)
                if failure is not None:
                    world.current().note_failure()
        finally:
            if keep:
                _leave_variables(module)
        del module
        gc.collect()  # models and buffers often lie in cycles
    return failure, time.perf_counter() - start


def _main_module(path: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    return module


def _enter_environment(
    stack: ExitStack,
    module: ModuleType,
    path: str,
    args: Sequence[str],
    n_ps: int,
    keep: bool,
    variables: dict[str, str],
) -> None:
    """Set up the environment of a separate process, until the stack is closed."""
    info = this_rank().info
    stack.enter_context(_as_main(module))
    stack.enter_context(_arguments(path, args))
    stack.enter_context(_environment(info.rank, info.world_size, n_ps, variables))
    stack.enter_context(_own_streams())
    stack.enter_context(_own_signals())
    stack.enter_context(start_method.pythons_own())
    stack.enter_context(_own_loop())
    stack.enter_context(shared_default_group.own_groups(keep=keep))
    stack.enter_context(cell_names.script(path))


def _run(module: ModuleType, path: str, is_module: bool) -> Failure | None:
    """Run the script; the failure, or None."""
    rank = this_rank()
    children = set(multiprocessing.active_children())
    failure: Failure | None = None
    with ExitStack() as stack:
        try:
            with rank.interrupts.armed():
                if is_module:
                    path, code = _become_module(module, os.path.basename(path))
                    stack.enter_context(cell_names.script(path))
                else:
                    code = compile(Path(path).read_bytes(), path, "exec")
                exec(code, module.__dict__)
        except SystemExit as end:
            failure = _exit_failure(end)
        except BaseException as error:  # noqa: BLE001 - any error is the reply
            failure = _failure(error, path)
    if failure is not None:
        _end_processes(set(multiprocessing.active_children()) - children)
    return failure


def _become_module(module: ModuleType, name: str) -> tuple[str, CodeType]:
    """Give `__main__` what `python -m name` gives it.

    Returns:
        The module's file, and its code.

    Raises:
        ModuleNotFoundError: There is no such module, or it cannot be run.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec and spec.loader and getattr(spec.loader, "get_code", None)
    if spec is None or spec.origin is None or not code:
        raise ModuleNotFoundError(
            f"no module {name!r} that can be run: it is looked for in the notebook's "
            f"folder, {os.getcwd()}, and in sys.path",
            name=name,
        )
    module.__file__ = sys.argv[0] = spec.origin
    module.__spec__, module.__package__ = spec, spec.parent
    return spec.origin, code(spec.name)


def _end_processes(processes: set[Any]) -> None:
    """End child processes of a script that has failed.

    They would keep its ports and files, and may wait for each other forever.
    """
    for process in processes:
        process.terminate()
    end = time.monotonic() + CHILD_END_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _exit_failure(end: SystemExit) -> Failure | None:
    """The failure of a script that has raised SystemExit; None for exit code 0."""
    if end.code in (None, 0):
        return None
    code, text = (end.code, "") if isinstance(end.code, int) else (1, f": {end.code}")
    info = this_rank().info
    location = cell_names.last_line(end)
    return Failure(
        info.rank, info.host, "SystemExit", f"exit code {code}{text}", location
    )


def _failure(error: BaseException, path: str) -> Failure:
    info = this_rank().info
    location = cell_names.last_line(error)
    trace = _from_script(error.__traceback__, path)
    error = original_error(error)

    def form(frames: TracebackType | None) -> list[str]:
        if isinstance(error, KeyboardInterrupt):  # it explains nothing, and is slow
            return []
        formatter = this_rank().shell.InteractiveTB
        return [*formatter.structured_traceback(type(error), error, frames)]

    name, message, lines = text_within_bounds(error, trace, form)
    release_variables(error)  # they may be large
    return Failure(info.rank, info.host, name, message, location, tuple(lines))


def _from_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    """The traceback from the script's first frame on, without nbdist's own frames."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename != path:
        first = first.tb_next
    return first


def _leave_variables(module: ModuleType) -> None:
    """Put the script's variables into the cells' namespace, except nbdist's names."""
    this_rank().shell.push(user_variables(vars(module)))


# -- the environment of a separate process ---------------------------------------------


@contextmanager
def _as_main(module: ModuleType) -> Iterator[None]:
    """Make the script the module `__main__`, which pickle and argparse look up."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = before


@contextmanager
def _arguments(path: str, args: Sequence[str]) -> Iterator[None]:
    """Set sys.argv and sys.path, and forget helper modules of the last script."""
    argv, search = sys.argv[:], sys.path[:]
    folder = os.path.dirname(path)
    for name in _helpers:
        sys.modules.pop(name, None)
    known = set(sys.modules)
    sys.argv[:] = [path, *args]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, search
        _helpers.clear()
        _helpers.update(
            name for name in set(sys.modules) - known if _lies_in(name, folder)
        )


def _lies_in(name: str, folder: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None) or ""
    return file.startswith(folder + os.sep) and "site-packages" not in file


@contextmanager
def _environment(
    rank: int, size: int, n_ps: int, variables: dict[str, str]
) -> Iterator[None]:
    """Set torchrun's variables; restore the environment and the folder at the end."""
    before = dict(os.environ)
    nowhere = [f"rank{other}:0" for other in range(size)]  # nothing listens there
    os.environ.update(variables)
    os.environ["TF_CONFIG"] = roles.tf_config(rank, nowhere, n_ps)
    try:
        with folders.restored():
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _own_streams() -> Iterator[None]:
    """Give the script a `sys.stdout` and a `sys.stderr` with Python's settings."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = this_rank().output.new_streams()
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # a script's own stream may be closed
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the rank's signal handlers at the end."""
    kinds = signal.SIGINT, signal.SIGTERM
    before: list[Any] = [signal.getsignal(kind) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _own_loop() -> Iterator[None]:
    """Hide the rank's running event loop, so that `asyncio.run` works."""
    loop = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.events._set_running_loop(loop)
