"""One rank's Keras variables, on all ranks."""

from __future__ import annotations

from typing import Any

from nbdist.horovod._state import broadcast_parameters

from ._backend import check_backend, tensors_of

__all__ = ["broadcast_global_variables"]


def broadcast_global_variables(root_rank: int, model: Any) -> None:
    """Overwrite a model's weights and optimizer state with rank `root_rank`'s.

    Every rank must call, with a model that is built. Keras 3 has no list of all
    variables, therefore the model is asked for.

    Args:
        root_rank: A rank.
        model: A `keras.Model`, compiled or not.
    """
    check_backend()
    variables = list(model.weights)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
    broadcast_parameters(tensors_of(variables), root_rank)
