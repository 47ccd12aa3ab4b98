"""Keras's `compile` and `fit` under a strategy.

A model that is compiled within the scope of a strategy has an optimizer that averages
gradients, and a `fit` that divides each batch among the replicas.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nbdist.collectives import all_reduce, broadcast, broadcast_object, default_group
from nbdist.errors import UsageError
from nbdist.training.data.sampler import share_of
from nbdist.training.keras_models import check_backend, reducing_optimizer, tensors_of

if TYPE_CHECKING:
    from nbdist.training.strategies.base import Strategy

__all__ = ["keras_scope"]

BATCH_SIZE = 32
"""Keras's default, and the largest number of samples in a global batch then."""


@contextlib.contextmanager
def keras_scope(strategy: Strategy) -> Iterator[Strategy]:
    """Have Keras models that are compiled in this block train under a strategy.

    Raises:
        UsageError: Keras does not use its torch backend.
    """
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "torch")
    check_backend()
    import keras

    owner = next(each for each in keras.Model.__mro__ if "compile" in vars(each))
    compile_alone = vars(owner)["compile"]

    @functools.wraps(compile_alone)
    def compile_on_all(
        model: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any
    ) -> None:
        optimizer = keras.optimizers.get(optimizer)
        if strategy.num_replicas > 1:
            optimizer = averaging_optimizer(optimizer)
        compile_alone(model, optimizer, *args, **kwargs)
        adopt(strategy, model)

    owner.compile = compile_on_all
    try:
        yield strategy
    finally:
        owner.compile = compile_alone


def adopt(strategy: Strategy, model: Any) -> None:
    """Have a compiled model's `fit` train under a strategy."""
    model.fit = partial(_fit, strategy, model)
    model._nbdist_adopt = partial(adopt, strategy)


def averaging_optimizer(optimizer: Any) -> Any:
    """An optimizer that applies the mean of all ranks' gradients.

    Every rank must train, with the same number of steps.
    """
    return reducing_optimizer(optimizer, _Mean(), averaging_optimizer)


class _Mean:
    """Averages buckets of gradients over the ranks: a `Reduction`."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return default_group().size

    def agree(self, numbers: Tensor) -> None:
        """Sum a table over the ranks. Its first row is the first rank's."""
        if default_group().rank != 0:
            numbers[0] = 0
        all_reduce(numbers)

    def begin(self, index: int, bucket: Tensor) -> Callable[[], object]:
        """Begin to average a bucket in place."""
        handle = all_reduce(bucket, "mean", async_op=True)
        assert handle is not None
        return handle.wait

    def sparse(self, index: int, gradient: Tensor) -> Tensor:
        """Return the mean of a sparse gradient."""
        mean = gradient.to_dense()
        all_reduce(mean, "mean")
        return mean.to_sparse(1)


def _fit(strategy: Strategy, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `model.fit`: every rank trains on its part of each batch."""
    fit = type(model).fit
    if strategy.num_replicas == 1:
        return fit(model, *args, **kwargs)
    bound = inspect.signature(fit).bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop("self", None)
    _split_validation(arguments)
    _divide(strategy, arguments)
    callbacks = list(arguments["callbacks"] or ())
    arguments["callbacks"] = [_same_beginning(), _mean_metrics(), *callbacks]
    return fit(model, **arguments)


# -- data ------------------------------------------------------------------------------


def _are_arrays(value: Any) -> bool:
    """Whether a value is an array, or a nested structure of arrays."""
    leaves = tree_leaves(value)
    return bool(leaves) and all(
        getattr(leaf, "shape", ()) and hasattr(leaf, "__getitem__") for leaf in leaves
    )


def _rows(value: Any, indices: Any) -> Any:
    """Rows of each array of a structure."""

    def take(leaf: Any) -> Any:
        if hasattr(leaf, "to_numpy"):  # of pandas
            leaf = leaf.to_numpy()
        return leaf[indices]

    return tree_map(take, value)


def _length(value: Any) -> int:
    return len(tree_leaves(value)[0])


def _split_validation(arguments: dict[str, Any]) -> None:
    """Separate the last rows for validation, as Keras does, before the rest is divided.

    Every rank validates on all of them.
    """
    share = arguments["validation_split"]
    if not share or arguments["validation_data"] is not None:
        return
    if not _are_arrays(arguments["x"]):
        return  # Keras says that this is not supported
    count = _length(arguments["x"])
    first = int(np.floor(count * (1 - share)))
    names = ("x", "y", "sample_weight")
    given = [name for name in names if arguments[name] is not None]
    arguments["validation_data"] = tuple(
        _rows(arguments[name], slice(first, None)) for name in given
    )
    for name in given:
        arguments[name] = _rows(arguments[name], slice(0, first))
    arguments["validation_split"] = 0.0


def _divide(strategy: Strategy, arguments: dict[str, Any]) -> None:
    """Replace arrays by this replica's parts of the global batches."""
    if not _are_arrays(arguments["x"]):
        return
    given = {name: arguments[name] for name in ("x", "y", "sample_weight")}
    batch_size = arguments["batch_size"] or BATCH_SIZE
    size = strategy.num_replicas
    total = _length(given["x"])
    uneven = batch_size % size or (total % batch_size) % size
    if uneven and arguments["class_weight"] is not None:
        raise UsageError(
            f"class_weight with {total} samples in batches of {batch_size} on {size} "
            "ranks: the parts of a batch differ in size, which needs sample_weight. "
            f"Pass sample_weight, or a number of samples and a batch_size that {size} "
            "divides"
        )
    seed = broadcast_object(random.randrange(2**32))
    shuffle = bool(arguments["shuffle"])
    arguments["x"] = _parts(strategy, given, batch_size, seed if shuffle else None)
    arguments |= {"y": None, "sample_weight": None, "batch_size": None}
    if arguments["validation_batch_size"] is None:
        arguments["validation_batch_size"] = batch_size
    arguments["shuffle"] = False


def _parts(
    strategy: Strategy, given: dict[str, Any], batch_size: int, seed: int | None
) -> Any:
    """A `PyDataset` of this replica's part of each global batch.

    Keras takes the mean loss of a part, and the ranks average their gradients. Weights
    make that the mean over the global batch where parts differ in size. An empty part
    is one sample of weight 0.

    Args:
        given: Arrays by name: "x", "y" and "sample_weight", of which the last two may
            be None.
        seed: The seed of the order, equal on all ranks; None for the arrays' order.
    """
    import keras

    total = _length(given["x"])
    replica, size = strategy.replica or 0, strategy.num_replicas

    class Parts(keras.utils.PyDataset):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._epoch = 0
            self._order = self._next_order()

        def _next_order(self) -> Any:
            if seed is None:
                return np.arange(total)
            return np.random.default_rng((seed, self._epoch)).permutation(total)

        def on_epoch_end(self) -> None:
            self._epoch += 1
            self._order = self._next_order()

        def __len__(self) -> int:
            return -(-total // batch_size)

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            batch = self._order[index * batch_size :][:batch_size]
            part = share_of(len(batch), replica, size)
            own = batch[part.start : part.stop]
            weight = len(own) * size / len(batch)
            rows = own if len(own) else batch[:1]
            x = _rows(given["x"], rows)
            y = None if given["y"] is None else _rows(given["y"], rows)
            weights = given["sample_weight"]
            if len(batch) % size:
                scale = np.full(len(rows), weight, dtype="float32")
                own_weights = 1.0 if weights is None else np.asarray(weights)[rows]
                return x, y, own_weights * scale
            if weights is not None:
                return x, y, np.asarray(weights)[rows]
            return (x,) if y is None else (x, y)

    return Parts()


# -- callbacks -------------------------------------------------------------------------


def _same_beginning() -> Any:
    """A callback that copies rank 0's weights and optimizer state to all ranks."""
    import keras

    class SameBeginning(keras.callbacks.Callback):  # type: ignore[misc]
        _done = False

        def on_train_begin(self, logs: Any = None) -> None:
            if self.model.built:
                _broadcast(self.model)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self._done:  # the first batch may have created variables
                self._done = True
                _broadcast(self.model)

    return SameBeginning()


def _broadcast(model: Any) -> None:
    root = default_group().ranks[0]
    with torch.no_grad():
        for tensor in tensors_of([*model.weights, *model.optimizer.variables]):
            broadcast(tensor, root)


def _mean_metrics() -> Any:
    """A callback that averages the metrics of an epoch over the ranks."""
    import keras

    class MeanMetrics(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            names = sorted(logs or {})
            values = [float(logs[name]) for name in names]
            means = torch.tensor(values, dtype=torch.float64)
            all_reduce(means, "mean")
            for name, mean in zip(names, means.tolist(), strict=True):
                logs[name] = mean

    return MeanMetrics()
