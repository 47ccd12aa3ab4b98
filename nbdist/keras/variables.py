"""The broadcast of Keras's variables to all ranks."""

from __future__ import annotations

from typing import Any

from nbdist.horovod.functions import broadcast_parameters
from nbdist.training.keras_models import check_backend, tensors_of

__all__ = ["broadcast_global_variables"]


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
