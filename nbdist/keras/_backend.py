"""Keras, once it is known to compute with torch."""

from __future__ import annotations

from typing import Any

from nbdist.errors import UsageError

__all__ = ["check_backend", "tensors_of"]


def check_backend() -> None:
    """Raise where Keras's tensors are not torch's.

    Raises:
        UsageError: They are another library's.
    """
    import keras

    if keras.backend.backend() != "torch":
        raise UsageError(
            f"Keras computes with {keras.backend.backend()} here: set "
            "KERAS_BACKEND=torch, or import nbdist.keras, before keras is imported"
        )


def tensors_of(variables: Any) -> list[Any]:
    """The torch tensors that hold the variables' values, to be changed in place."""
    return [variable.value.detach() for variable in variables]
