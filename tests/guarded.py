"""Containers that may be touched only by the thread that holds a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

TOUCHES = (
    "__iter__", "__len__", "__contains__", "__getitem__", "__setitem__", "__delitem__",
    "append", "clear", "extend", "get", "items", "keys", "pop", "popitem", "popleft",
    "remove", "setdefault", "update", "values",
)  # fmt: skip


def is_held(lock: Any) -> bool:
    """Whether this thread holds a lock; of a plain one, whether any thread does."""
    own = getattr(lock, "_is_owned", None)
    return bool(lock.locked() if own is None else own())


def guarded(container: T, lock: Callable[[], Any]) -> T:
    """A copy of a list, dict or deque that is an error to touch without the lock."""
    kind: Any = type(container)

    def checking(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def checked(self: Any, *args: Any, **options: Any) -> Any:
            assert is_held(lock()), f"{name} without the lock"
            return method(self, *args, **options)

        return checked

    methods = {name: checking(name) for name in TOUCHES if hasattr(kind, name)}
    made = type(f"Guarded{kind.__name__}", (kind,), methods)
    maxlen = getattr(container, "maxlen", None)
    return made(container) if maxlen is None else made(container, maxlen)  # type: ignore[no-any-return]
