"""Functions that ranks run: variables of many kinds, and one flipped bit in them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from nbdist.engine.rank import this_rank

__all__ = ["flip", "make"]


def make() -> None:
    """Make the variables, with equal values on all ranks."""
    rng = random.Random(1)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(9, 33), nn.BatchNorm1d(33), nn.Linear(33, 5).bfloat16()
    )
    model.register_buffer("hidden", torch.randn(11), persistent=False)
    optimizer = torch.optim.AdamW(model[:2].parameters())
    model[:2](torch.randn(8, 9)).square().sum().backward()
    optimizer.step()
    this_rank().shell.push(
        {
            "b_model": model,
            "b_optimizer": optimizer,
            "b_nested": {"a": [[rng.random(), i, f"text {i}"] for i in range(20)]},
            "b_floats": [rng.random() for _ in range(1000)],
            "b_frame": pd.DataFrame(
                {
                    "x": np.random.default_rng(1).normal(size=50),
                    "n": np.arange(50),
                    "s": [f"name {i}" for i in range(50)],
                }
            ),
            "b_array": np.arange(60.0).reshape(6, 10).T,
            "b_half": torch.randn(77).half()[::2],
            "b_complex": torch.randn(6, 5, dtype=torch.complex64).t(),
            "b_nan": torch.full((40,), float("nan")),
            "b_sparse": torch.diag(torch.randn(9)).to_sparse(),
            "b_scalar": torch.tensor(3.0, dtype=torch.float64),
            "b_empty": torch.empty(0, 3),
        }
    )


def flip(seed: int) -> str:
    """Flip one bit. The same seed flips it back. Returns the name of the variable."""
    rng = random.Random(seed)
    names = this_rank().shell.user_ns
    model, frame = names["b_model"], names["b_frame"]
    state = names["b_optimizer"].state_dict()["state"]
    tensors = {
        "b_model": [*model.parameters(), *model.buffers()],
        "b_optimizer": [t for each in state.values() for t in each.values()],
        **{name: [names[name]] for name in ("b_half", "b_complex", "b_nan")},
        "b_sparse": [names["b_sparse"].values(), names["b_sparse"].indices()],
        "b_scalar": [names["b_scalar"]],
    }
    ways: dict[str, Callable[[], None]] = {
        name: _later(_flip_tensor, rng, chosen) for name, chosen in tensors.items()
    }
    ways["b_nested"] = lambda: _flip_list(rng, rng.choice(names["b_nested"]["a"]))
    ways["b_floats"] = lambda: _flip_list(rng, names["b_floats"])
    ways["b_frame"] = lambda: _flip_cell(rng, frame)
    ways["b_array"] = lambda: _flip_array(rng, names["b_array"])
    chosen = rng.choice(sorted(ways))
    ways[chosen]()
    return chosen


def _later(function: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: function(*args)


def _flip_tensor(rng: random.Random, tensors: list[torch.Tensor]) -> None:
    flat = rng.choice(tensors).detach()
    index = tuple(rng.randrange(size) for size in flat.shape)
    element = flat[index].clone().reshape(1).view(torch.uint8)
    element[rng.randrange(len(element))] ^= 1 << rng.randrange(8)
    octets = element.view(flat.dtype)
    flat[index] = octets[0]


def _flip_array(rng: random.Random, array: np.ndarray[Any, Any]) -> None:
    index = tuple(rng.randrange(size) for size in array.shape)
    array[index] = _flipped(rng, float(array[index]))


def _flip_list(rng: random.Random, items: list[Any]) -> None:
    index = rng.randrange(len(items))
    items[index] = _flipped(rng, items[index])


def _flip_cell(rng: random.Random, frame: pd.DataFrame) -> None:
    row, column = rng.randrange(len(frame)), rng.choice(["x", "n", "s"])
    value = frame.at[row, column]
    plain = value if isinstance(value, str) else value.item()
    frame.at[row, column] = _flipped(rng, plain)


def _flipped(rng: random.Random, value: Any) -> Any:
    """A float, integer or text with one bit changed."""
    if isinstance(value, float):
        octets = struct.unpack("<Q", struct.pack("<d", value))[0]
        return struct.unpack("<d", struct.pack("<Q", octets ^ 1 << rng.randrange(64)))[
            0
        ]
    if isinstance(value, int):
        return value ^ 1 << rng.randrange(32)
    place = rng.randrange(len(value))
    return value[:place] + chr(ord(value[place]) ^ 1) + value[place + 1 :]
