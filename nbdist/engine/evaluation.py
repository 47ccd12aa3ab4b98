"""Evaluates the expressions that the notebook and assistants look at."""

from __future__ import annotations

import ast
from collections import ChainMap, defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from nbdist.engine.random_states import unmoved
from nbdist.engine.rank import this_rank
from nbdist.ipc.own_memory import check_array, check_values

__all__ = ["evaluate", "looking_at"]

READING = (
    ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple,
    ast.Constant, ast.UnaryOp, ast.USub, ast.Load,
)  # fmt: skip

BASE = "_nbdist_base"
"""The name of the value of which an item is looked up."""


def evaluate(expression: str) -> Any:
    """The value of an expression among the user's variables.

    An item is looked up only where that can neither fault nor add an item: a
    `defaultdict` would add what it does not have.

    Raises:
        Unreadable: The memory of a tensor or array with an index cannot be read.
        KeyError: A `defaultdict` has no such item.
        Exception: The expression has raised.
    """
    return _value(ast.parse(expression.strip(), mode="eval").body)


def looking_at(expression: str) -> AbstractContextManager[None]:
    """The context in which an expression's value is made and shown.

    A name with attributes and indices only reads. What its `__getitem__` and properties
    draw, such as a dataset's, does not move the random numbers of later cells.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        return nullcontext()
    is_reading = all(isinstance(node, READING) for node in ast.walk(tree))
    return unmoved() if is_reading else nullcontext()


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value), node.attr)
    if not isinstance(node, ast.Subscript):
        return _evaluated(node, {})
    base = _value(node.value)
    kind = type(base)
    if issubclass(kind, np.ndarray):
        check_array(base)
    elif issubclass(kind, torch.Tensor):
        check_values(base)
    elif issubclass(kind, defaultdict) and not isinstance(node.slice, ast.Slice):
        key = _evaluated(node.slice, {})
        if not dict.__contains__(base, key):
            raise KeyError(f"{key!r}, which a look does not add to the {kind.__name__}")
    name = ast.copy_location(ast.Name(BASE, ast.Load()), node.value)
    item = ast.copy_location(ast.Subscript(name, node.slice, ast.Load()), node)
    return _evaluated(item, {BASE: base})


def _evaluated(node: ast.expr, names: dict[str, Any]) -> Any:
    shell = this_rank().shell
    code = compile(ast.Expression(node), "<string>", "eval")
    own = ChainMap(names, shell.user_ns) if names else shell.user_ns
    return eval(code, shell.user_global_ns, own)
