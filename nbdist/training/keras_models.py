"""Keras's models and optimizers as torch tensors, for the ranks of a world.

Keras is used only once the user has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from nbdist.errors import UsageError
from nbdist.training import lasting
from nbdist.training.gradients import GradientReducer, Reduction

__all__ = [
    "check_backend",
    "is_model",
    "load_model_state",
    "model_state",
    "reducing_optimizer",
    "tensors_of",
]

Optimizer = TypeVar("Optimizer")


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


# -- an optimizer of several ranks -----------------------------------------------------


def reducing_optimizer(
    optimizer: Optimizer, reduction: Reduction, rewrap: Callable[[Any], Any]
) -> Optimizer:
    """Make an optimizer that applies gradients after the ranks have reduced them.

    The class of the result is a subclass of the given optimizer's class, and has its
    name, so that a model saved with it can be loaded with the given optimizer's class.

    Args:
        optimizer: A `keras.optimizers.Optimizer`. Its options and state are copied.
        reduction: Reduces buckets of gradients. A variable without a gradient counts as
            zero.
        rewrap: Makes such an optimizer of a plain one. It can be pickled: a rank that
            joins later calls it.
    """
    base: Any = type(optimizer)
    if hasattr(base, "_nbdist_base"):
        base = base._nbdist_base  # wrapped before, as in a cell that is run again
    steps = _Steps(reduction)

    def scale_loss(self: Any, loss: Any) -> Any:
        # Keras's training step calls this directly before backward.
        if self.built:
            steps.begin([each for each in self._trainable_variables if each.trainable])
        return base.scale_loss(self, loss)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = trainable_variables or self._trainable_variables
        base.apply(self, steps.end(list(grads), list(variables)), trainable_variables)

    members = {
        "apply": apply,
        "scale_loss": scale_loss,
        "_nbdist_base": base,
        "_nbdist_rewrap": staticmethod(rewrap),
        "__module__": base.__module__,
    }
    made: Any = type(base.__name__, (base,), members)
    distributed = made.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    _copy_state(optimizer, distributed)
    return distributed  # type: ignore[no-any-return]


class _Steps:
    """The training steps of an optimizer, whose gradients the ranks reduce.

    Args:
        reduction: Reduces the buckets.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._reducer: GradientReducer | None = None
        self._reduced: frozenset[int] = frozenset()
        lasting.register(self)

    def _begin_again(self) -> None:
        """Forget the reducer, whose parameters the ranks may have reached or not."""
        self._reducer = None

    def begin(self, variables: Sequence[Any]) -> None:
        """Begin a step. The next backward computes the gradients of these variables.

        They are reduced while it runs.
        """
        if self._reduction.size > 1:
            self._reducer_of([each.value for each in variables]).expect()

    def end(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Tensor]:
        """Wait for the reduced gradients. Every rank must call.

        Args:
            gradients: One for each variable, or None. Without `begin`, they need not be
                those that backward has left in the variables' tensors.

        Raises:
            UsageError: Gradients were changed after `begin`, or are of other variables.
        """
        parameters = [each.value for each in variables]
        if self._reduction.size > 1:
            before = self._reducer
            reducer = self._reducer_of(parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is not gradient:
                    parameter.grad = gradient
            is_other = before is not None and before is not reducer and before.pending
            if is_other or reducer.changed:
                for each in (before, reducer):
                    if each is not None:
                        each.abandon()
                raise UsageError(
                    "apply() got other gradients than those that backward() computed "
                    "after scale_loss(), while the ranks reduce these: clip them with "
                    "clipnorm=, clipvalue= or global_clipnorm= of the optimizer, or "
                    "call no scale_loss()"
                )
            reducer.synchronize()
            gradients = [parameter.grad for parameter in parameters]
        return [
            torch.zeros_like(parameter) if gradient is None else gradient
            for gradient, parameter in zip(gradients, parameters, strict=True)
        ]

    def _reducer_of(self, parameters: list[Tensor]) -> GradientReducer:
        """The reducer of these parameters' gradients."""
        reduced = frozenset(map(id, parameters))
        if self._reducer is None or self._reduced != reduced:
            self._reducer, self._reduced = None, reduced
            self._reducer = GradientReducer(
                parameters, self._reduction, expects_all=False
            )
        return self._reducer


def _copy_state(source: Any, target: Any) -> None:
    if source.built:
        target.build(source._trainable_variables)
        for own, other in zip(target.variables, source.variables, strict=True):
            own.assign(other)


# -- the state of a model --------------------------------------------------------------


def is_model(value: object) -> TypeGuard[torch.nn.Module]:
    """Whether a value is a Keras model on the torch backend."""
    keras = sys.modules.get("keras")
    return (
        keras is not None
        and isinstance(value, torch.nn.Module)
        and isinstance(value, keras.Model)
    )


def model_state(model: Any) -> dict[str, list[Tensor]]:
    """The values of a Keras model and of its optimizer. They share its tensors.

    They have no names, because Keras numbers the names of layers in each process. An
    optimizer that has not trained yet gets its variables first.
    """
    return {name: tensors_of(each) for name, each in _variables(model).items()}


def load_model_state(model: Any, state: dict[str, list[Tensor]]) -> None:
    """Load what `model_state` returned, in place.

    Raises:
        UsageError: The model has another number of weights.
    """
    for name, variables in _variables(model).items():
        own, values = tensors_of(variables), state.get(name, [])
        if len(own) != len(values):
            raise UsageError(
                f"the Keras model has {len(own)} tensors of {name}, and the saved one "
                f"has {len(values)}: build and compile the same model first"
            )
        with torch.no_grad():
            for tensor, value in zip(own, values, strict=True):
                tensor.copy_(value)


def _variables(model: Any) -> dict[str, Any]:
    """The variables of a model's weights and of its optimizer."""
    optimizer = _built_optimizer(model)
    return {
        "weights": model.weights,
        "the optimizer": [] if optimizer is None else optimizer.variables,
    }


def _built_optimizer(model: Any) -> Any:
    """The optimizer of a model that can train, with its variables; else None."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not model.built:
        return None
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer
