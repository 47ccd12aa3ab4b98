"""How Keras's models and optimizers are pickled for another process.

Keras pickles a model as a `.keras` archive. A rank that joins would get another
optimizer object in the model than in the variable `optimizer`, one that does not
communicate, and a bare optimizer without its state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["reduce"]


def reduce(value: Any) -> tuple[Any, ...] | None:
    """`(function, arguments)` for pickle; None for an object that is not Keras's."""
    keras = sys.modules.get("keras")
    # Keras may be in the middle of its import.
    if keras is None or not (hasattr(keras, "Model") and hasattr(keras, "optimizers")):
        return None
    if isinstance(value, keras.Model) and getattr(value, "optimizer", None) is not None:
        adopt = vars(value).get("_nbdist_adopt")
        return _rebuild_model, (*value.__reduce__(), value.optimizer, adopt)
    if isinstance(value, keras.optimizers.Optimizer):
        base = getattr(type(value), "_nbdist_base", type(value))
        rewrap = getattr(type(value), "_nbdist_rewrap", None)
        arrays = [variable.numpy() for variable in value.variables]
        return _rebuild_optimizer, (base, value.get_config(), rewrap, arrays)
    return None


def _rebuild_model(
    load: Callable[..., Any],
    arguments: tuple[Any, ...],
    optimizer: Any,
    adopt: Callable[[Any], None] | None,
) -> Any:
    """A model with this optimizer.

    Args:
        load, arguments: How Keras unpickles the model, with an optimizer of its own.
        optimizer: From `_rebuild_optimizer`.
        adopt: Prepares the model for training on all ranks; None for one rank.
    """
    model = load(*arguments)
    arrays = vars(optimizer).pop("_nbdist_arrays", [])
    if model.built and len(optimizer.variables) < len(arrays):
        optimizer.build(model.trainable_variables)
    if len(optimizer.variables) == len(arrays):
        for variable, array in zip(optimizer.variables, arrays, strict=True):
            variable.assign(array)
    model.optimizer = optimizer
    if adopt is not None:
        adopt(model)
    return model


def _rebuild_optimizer(
    base: Any,
    config: dict[str, Any],
    rewrap: Callable[[Any], Any] | None,
    arrays: list[Any],
) -> Any:
    """An optimizer, whose variables exist once it belongs to a model."""
    optimizer = base.from_config(config)
    if rewrap is not None:
        optimizer = rewrap(optimizer)
    if len(optimizer.variables) == len(arrays):
        for variable, array in zip(optimizer.variables, arrays, strict=True):
            variable.assign(array)
    vars(optimizer)["_nbdist_arrays"] = arrays
    return optimizer
