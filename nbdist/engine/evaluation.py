"""Evaluates the expressions that the notebook and assistants look at."""

from __future__ import annotations

import ast
from collections import ChainMap, defaultdict
from typing import Any

import numpy as np
import torch

from nbdist.engine.rank import this_rank
from nbdist.ipc.own_memory import check_array, check_values

__all__ = ["evaluate"]

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
