"""Draws values whose tensors and arrays are views of a few pieces of memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["drawn", "leaves", "memory_of"]

View = torch.Tensor | np.ndarray[Any, Any]
Step = Callable[[Any], Any]

DTYPES = (
    torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16,
    torch.complex64,
)  # fmt: skip


def _base(numbers: random.Random) -> View:
    count = numbers.choice([1, 7, 24, 24, 360])
    if numbers.random() < 0.3:
        return np.arange(count).view(numbers.choice(["i8", "f8", "M8[D]", "i4,f4"]))
    return torch.arange(count).to(numbers.choice(DTYPES))


def _view(numbers: random.Random, base: View) -> View:
    """A view of a base: the whole, a part, with other strides, dtype or library."""
    whole: Any = base
    first = numbers.randrange(len(whole))
    last = numbers.randint(first, len(whole))
    step = numbers.randint(1, 3)
    kinds: list[Step] = [
        lambda b: b,
        lambda b: b[first:last],
        lambda b: b[first::step],
        lambda b: b[first],
    ]
    if len(whole) % 6 == 0:
        kinds += [lambda b: b.reshape(6, -1).T, lambda b: b.reshape(6, -1)[:, -1]]
    if isinstance(base, torch.Tensor):
        kinds += [
            lambda b: b[first : first + 1].expand(5),
            lambda b: b.view(torch.uint8)[1:],
            lambda b: torch.nn.Parameter(b, requires_grad=b.is_floating_point()),
            lambda b: b.unfold(0, 1, 1),
        ]
        if base.dtype in (torch.float32, torch.int64):
            kinds.append(lambda b: b.numpy())
    else:
        kinds += [
            lambda b: b[::-1],
            lambda b: b[::-step],
            lambda b: np.broadcast_to(b, (3, *b.shape)),
        ]
    view = numbers.choice(kinds)(whole)
    return view if isinstance(view, (torch.Tensor, np.ndarray)) else whole


def drawn(numbers: random.Random) -> dict[str, Any]:
    """Named values: views, containers of views, modules and optimizers of them."""
    bases = [_base(numbers) for _ in range(numbers.randint(1, 3))]

    def value(depth: int) -> Any:
        kind = numbers.randrange(5) if depth else 0
        if kind == 1:
            return [value(depth - 1) for _ in range(numbers.randrange(4))]
        if kind == 2:
            return {name: value(depth - 1) for name in "ab"}
        if kind == 3:
            module = torch.nn.Module()
            for name in ("first", "second"):
                made = value(0)
                if isinstance(made, torch.Tensor) and not hasattr(module, name):
                    module.register_buffer(name, made.detach())
                else:
                    setattr(module, name, made)
            return module
        return _view(numbers, numbers.choice(bases))

    return {f"x{number}": value(2) for number in range(numbers.randint(1, 5))}


def leaves(value: Any) -> Iterator[Any]:
    """The tensors and arrays of a value, in order."""
    if isinstance(value, torch.nn.Module):
        value = {**value._buffers, **value._parameters, **vars(value)}
        value = [value[name] for name in ("first", "second")]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def memory_of(view: Any) -> list[int]:
    """The address of each element, in order."""
    if isinstance(view, torch.Tensor):
        first, size = view.data_ptr(), view.element_size()
        shape, strides = tuple(view.shape), [s * size for s in view.stride()]
    else:
        first = view.__array_interface__["data"][0]
        shape, strides = view.shape, view.strides
    places = np.zeros(shape, dtype=np.int64)
    for axis, (count, stride) in enumerate(zip(shape, strides, strict=True)):
        line = [1] * len(shape)
        line[axis] = count
        places = places + (np.arange(count) * stride).reshape(line)
    return [first + int(each) for each in places.reshape(-1)]
