"""Has what a cell defines reach the worker processes of `multiprocessing`.

pickle sends a function or class as its name in a module. A worker that is not forked
("spawn", "forkserver") has no `__main__` with the names of the cells. `install` has
`multiprocessing` send there by value what cannot be imported. The functions that make
it again in the worker install the same there, for the results. A forked worker has the
names; it gets by value what has none, such as a lambda, or was defined after the fork.

A function takes the variables along that it uses. In a worker all functions of the
cells share them. A variable that is there already is kept, because an initializer may
have set it, or the worker may have filled it. Only a function or class is replaced.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing.process
import operator
import os
import pickle
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FunctionType, ModuleType
from typing import Any

from nbdist.ipc.serialization import CodePickler

__all__ = ["install", "sharing"]

CELLS = ""
"""The name of the cells' namespace."""
MARK = "__nbdist_namespace__"
"""Where a namespace that is neither the cells' nor a module's has its name."""

_TYPES = {
    kind: reduce
    for kind, reduce in CodePickler.dispatch_table.maps[0].items()
    # A copy of an open file or of memory would surprise.
    if kind not in (io.TextIOWrapper, memoryview)
}
"""What functions and classes consist of, and how it is pickled."""

_code = CodePickler(io.BytesIO())
"""Makes the values that stand for code in a pickle."""
_namespaces: dict[str, dict[str, Any]] = {}
"""The globals of functions that cannot be imported, by a name for all processes."""
_latest: dict[int, weakref.ref[Any]] = {}
"""The functions and classes that `__main__` had at the latest fork, by their ids."""
_known: weakref.WeakKeyDictionary[Any, dict[int, weakref.ref[Any]]] = (
    weakref.WeakKeyDictionary()
)
"""Those that it had when a child process was forked, by its `Process` object."""
_is_worker = False
"""Whether this process was not forked, and has got what it knows of the cells."""
_keys: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
"""A number of each class that was sent or has arrived complete, equal in all processes,
so that an instance that comes back is one of the same class."""
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def install(cells: dict[str, Any]) -> None:
    """Have this process send by value what its `__main__` defines.

    Args:
        cells: The variables of `__main__`. While `__main__` is another module, such as
            that of a script, pickle sends names as usual.
    """
    _namespaces[CELLS] = cells
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]
    ForkingPickler.dump = _dump  # type: ignore[method-assign]
    os.register_at_fork(before=_note_names)


@contextmanager
def sharing(function: object) -> Iterator[None]:
    """Within this block, forked workers share the variables of a function's file.

    Args:
        function: A function that was pickled by value in another process. Any other
            object has no such variables.
    """
    name = CELLS
    if type(function) is FunctionType:
        namespace = _Namespace(function.__globals__)
        if not namespace.is_module:
            name = namespace.name
            _namespaces.setdefault(name, function.__globals__)
    try:
        yield
    finally:
        if name != CELLS:
            _namespaces.pop(name, None)


def _install_in_worker() -> None:
    """Give a worker that is not forked a `__main__` for what arrives."""
    global _is_worker
    if CELLS not in _namespaces:
        # The fork server may have run a script as its own `__main__`.
        main = sys.modules["__main__"] = ModuleType("__main__")
        _is_worker = True
        install(vars(main))


def _dump(pickler: Any, value: object) -> None:
    """`ForkingPickler.dump`, with an error that says what to do."""
    try:
        pickle.Pickler.dump(pickler, value)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        if not _sends_to_unforked():
            raise
        hint = (
            "A worker process that is not forked gets a copy of its function, its data "
            "and the variables that they use: make this object in the worker, or start "
            "the workers by 'fork'"
        )
        error.args = (f"{error}. {hint}",)
        raise


def _sends_to_unforked() -> bool:
    """Whether what is pickled may reach a process that this one has not forked."""
    if get_spawning_popen() is not None:
        return True
    methods = {getattr(child._popen, "method", "fork") for child in _children()}
    # A queue may be filled before the workers start.
    is_for_later = not methods and multiprocessing.parent_process() is None
    return is_for_later or bool(methods - {"fork"})


def _children() -> list[Any]:
    return list(vars(multiprocessing.process)["_children"])


def _note_names() -> None:
    """Keep what `__main__` defines, before a fork."""
    global _latest
    for child in _children():
        _known.setdefault(child, _latest)
    # No code of the user's runs here, such as a metaclass's `__hash__`.
    values = list(_cells().values())
    _latest = {id(value): weakref.ref(value) for value in values if _is_code(value)}


# -- pickling --------------------------------------------------------------------------


def _reduce(pickler: Any, value: object) -> Any:
    """`ForkingPickler.reducer_override`: how a value is pickled."""
    if vars(sys.modules["__main__"]) is not _cells():
        return NotImplemented
    kind = type(value)
    if kind is FunctionType or issubclass(kind, type):
        return _reduce_code(value)
    # ipyparallel has another way, which would import it in the worker.
    if kind is CodeType:
        return _code.reducer_override(value)
    reduce = None if kind in pickler.dispatch_table else _TYPES.get(kind)
    return NotImplemented if reduce is None else reduce(value)


def _cells() -> dict[str, Any]:
    return _namespaces[CELLS]


def _reduce_code(value: Any) -> Any:
    """How a function or a class is pickled."""
    is_copied = _is_worker or _sends_to_unforked()
    if not is_copied and value.__module__ == "__main__" and _is_known(value):
        return NotImplemented
    if _is_worker and value in _keys and not _sends_to_unforked():
        return _find_class, (_keys[value], value.__qualname__)
    _code.globals_ref.clear()
    reduced = _code.reducer_override(value)
    if reduced is NotImplemented or len(reduced) == 2:  # it can be imported
        return reduced
    make, arguments, state, _, _, put = reduced
    if isinstance(value, type):
        key = _keys.setdefault(value, uuid.uuid4().hex)
        _classes[key] = value
        state = key, put, state
        return _make_class, (key, make, arguments), state, None, None, _complete_class
    namespace = _Namespace(value.__globals__)
    if namespace.is_module:
        state[1]["__globals__"] = {}
    body, _globals, *rest = arguments
    arguments = (body, namespace, *rest)
    return make, arguments, (put, state), None, None, _complete_function


def _is_known(value: Any) -> bool:
    """Whether each child has a function or class of `__main__` under its name."""
    name = value.__qualname__
    try:
        found = operator.attrgetter(name)(sys.modules["__main__"])
    except AttributeError:
        return False
    outer = _cells()[name.partition(".")[0]]
    return found is value and all(
        (known := _known.get(child, _latest).get(id(outer))) and known() is outer
        for child in _children()
    )


class _Namespace:
    """Replaces the globals of a function in its pickle."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        module = sys.modules.get(namespace.get("__name__", ""))
        self.is_module = (
            namespace is not _cells()
            and getattr(module, "__spec__", None) is not None
            and vars(module) is namespace
        )
        if namespace is _cells():
            self.name = CELLS
        elif self.is_module:
            self.name = namespace["__name__"]
        else:
            self.name = namespace.setdefault(MARK, uuid.uuid4().hex)

    def __reduce__(self) -> Any:
        return _find_namespace, (self.name, self.is_module)


# -- unpickling ------------------------------------------------------------------------


def _find_namespace(name: str, is_module: bool) -> dict[str, Any]:
    _install_in_worker()
    if is_module:
        return vars(importlib.import_module(name))
    return _namespaces.setdefault(name, {"__name__": "__main__", MARK: name})


def _complete_function(function: FunctionType, state: Any) -> None:
    put, (attributes, slots) = state
    kept = function.__globals__
    for name, value in slots["__globals__"].items():
        replaces = _is_code(value) and _is_code(kept.get(name))
        if name not in kept or replaces:
            kept[name] = value
    put(function, (attributes, {**slots, "__globals__": {}}))


def _is_code(value: object) -> bool:
    return issubclass(type(value), (FunctionType, type))


def _make_class(key: str, make: Callable[..., type], arguments: Any) -> type:
    _install_in_worker()
    found = _classes.get(key)
    if found is None:
        found = _classes[key] = make(*arguments)
    return found


def _complete_class(found: type, state: Any) -> None:
    key, put, content = state
    if found not in _keys:  # it is not the class that was sent
        put(found, content)
        _keys[found] = key


def _find_class(key: str, name: str) -> type:
    """The class of an instance that a worker has returned."""
    _install_in_worker()
    found = _classes.get(key) or _cells().get(name)
    if not isinstance(found, type):
        raise pickle.UnpicklingError(
            f"the class {name} of an instance that a worker has sent is not in this "
            "process any more, or was not sent to it: keep a reference to the class"
        )
    return found
