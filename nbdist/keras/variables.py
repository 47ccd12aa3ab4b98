"""Keras's variables as torch tensors, and their broadcast to all ranks."""

from __future__ import annotations

from typing import Any

from nbdist.errors import UsageError
from nbdist.horovod.functions import broadcast_parameters

__all__ = ["broadcast_global_variables", "check_backend", "tensors_of"]


def check_backend() -> None:
    """Check that Keras uses its torch backend.

    Raises:
        UsageError: Keras uses another backend.
    """
    import keras

    if keras.backend.backend() != "torch":
        raise UsageError(
            f"Keras uses the backend {keras.backend.backend()}: set "
            "KERAS_BACKEND=torch, or import nbdist.keras, before keras is imported"
        )


def tensors_of(variables: Any) -> list[Any]:
    """The torch tensors that hold the variables' values, without gradients."""
    return [variable.value.detach() for variable in variables]


def broadcast_global_variables(root_rank: int, model: Any) -> None:
    """Overwrite a model's weights and optimizer state with rank `root_rank`'s.

    Every rank must call, with a built model. The model is an argument because Keras 3
    has no global list of variables.

    Args:
        root_rank: A world rank.
        model: A `keras.Model`, compiled or not.
    """
    check_backend()
    variables = list(model.weights)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
    broadcast_parameters(tensors_of(variables), root_rank)
