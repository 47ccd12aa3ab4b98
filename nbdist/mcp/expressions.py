"""Which expressions only read a value."""

from __future__ import annotations

import ast

from nbdist.errors import UsageError

__all__ = ["check_reads_only"]

READING = (
    ast.Expression, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple,
    ast.Constant, ast.UnaryOp, ast.USub, ast.Load,
)  # fmt: skip


def check_reads_only(expression: str) -> None:
    """Check that an expression is a name, with attributes and constant indices.

    Raises:
        UsageError: It is not an expression, or it could change something.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise UsageError(f"{expression!r} is not an expression") from None
    for node in ast.walk(tree):
        if not isinstance(node, READING):
            raise UsageError(
                f"{expression!r} may do more than read: without --allow-run, an "
                "expression is a name with attributes and indices, such as "
                "model.layers[0].weight"
            )
