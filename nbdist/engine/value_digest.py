"""Digests of a rank's values, by which they are compared with those of other ranks."""

from __future__ import annotations

import torch

from nbdist.errors import encodable, text_of
from nbdist.training.digest import combined, digests_of
from nbdist.training.leaves import Deadline, TooSlow, leaves_of

__all__ = ["digest_in_full", "digest_of"]


def digest_of(name: str, value: object, deadline: Deadline) -> tuple[str, str]:
    """A value's digest, and why it cannot be compared; "" if it can.

    Two values are equal, bit for bit, if both can be compared and the digests agree.

    Raises:
        TooSlow: The deadline has passed.
    """
    try:
        leaves = leaves_of(name, value, deadline)
        digests = digests_of(leaves, deadline)
    except (MemoryError, RuntimeError) as error:
        return "", text_of(error)
    why = ""
    for leaf, digest in zip(leaves, digests, strict=True):
        if isinstance(digest, str):
            why = digest if leaf.name == name else f"{leaf.name}: {digest}"
            break
    return combined(leaves, digests).hex(), encodable(why)


def digest_in_full(name: str, value: object, deadline: Deadline) -> tuple[str, str]:
    """As `digest_of`, with the gradients of a module, whose norms `in_full` shows.

    A value that takes longer than the deadline cannot be compared.
    """
    try:
        if isinstance(value, torch.nn.Module):
            gradients = {each: p.grad for each, p in value.named_parameters()}
            return digest_of(name, (value, gradients), deadline)
        return digest_of(name, value, deadline)
    except TooSlow as error:
        return "", str(error)
