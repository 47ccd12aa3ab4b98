"""Digests of values: equal on two ranks if, and only if, the values are equal.

"If" is exact. "Only if" holds up to accidental collisions: two different values have
the same digest with a probability of about 2^-64.

The digest of a tensor is computed on the tensor's device, from its raw bytes. So NaNs
are equal if their bits are, and 0.0 differs from -0.0.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbdist.errors import text_of
from nbdist.ipc.own_memory import Unreadable
from nbdist.training.blocks import check_device, octet_blocks, strided
from nbdist.training.leaves import Deadline, Leaf

__all__ = ["combined", "device_hash", "digests_of", "octets_of"]

DEVICE_BLOCK_BYTES = 32 << 20
"""Bytes that are read between two looks at the deadline."""
DIGEST_BYTES = 16

GAMMA, FIRST, SECOND = (
    constant - (1 << 64)  # as signed integers
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The constants of SplitMix64 (Steele, Lea and Flood, 2014)."""


def digests_of(
    leaves: Sequence[Leaf], deadline: Deadline | None = None
) -> list[bytes | str]:
    """The digest of each leaf's form and content, or why it cannot be compared.

    All tensors of one accelerator cost one transfer of 8 bytes each, and so one
    synchronisation with it.

    Raises:
        TooSlow: The deadline has passed.
    """
    deadline = deadline or Deadline()
    digests: list[bytes | str] = []
    pending: defaultdict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        deadline.check()
        digests.append(leaf.uncompared)
        content = leaf.content
        try:
            if isinstance(content, Tensor) and content.device.type != "cpu":
                check_device(content.device)
                hashed = device_hash(content, deadline)
                pending[content.device].append((index, hashed))
            elif content is not None:
                digests[index] = _host_digest(leaf.form, content, deadline)
        except Unreadable as error:
            digests[index] = str(error)
        except RuntimeError as error:  # torch's, such as one of a lack of memory
            digests[index] = text_of(error)
    for hashes in pending.values():
        values = torch.stack([each for _, each in hashes]).tolist()
        for (index, _), value in zip(hashes, values, strict=True):
            octets = value.to_bytes(8, "little", signed=True)
            digests[index] = _host_digest(leaves[index].form, octets, deadline)
    return digests


def combined(leaves: Sequence[Leaf], digests: Sequence[bytes | str]) -> bytes:
    """One digest of all leaves that can be compared, with their names."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for leaf, digest in zip(leaves, digests, strict=True):
        name = leaf.name.encode("utf-8", "surrogatepass")
        hasher.update(len(name).to_bytes(8, "little") + name)
        if isinstance(digest, bytes):
            hasher.update(digest)
    return hasher.digest()


@torch.no_grad()
def device_hash(tensor: Tensor, deadline: Deadline | None = None) -> Tensor:
    """A hash of a dense tensor's bytes, computed on its device; int64, shape ().

    Each word of 8 bytes is added to its position's constant and mixed by SplitMix64,
    which is a bijection. The hash is the sum of the mixed words. A change of one word
    therefore always changes the hash.
    """
    octets = octets_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, octets.numel(), DEVICE_BLOCK_BYTES):
        if deadline is not None:
            deadline.check()
        words = _words(octets[start : start + DEVICE_BLOCK_BYTES])
        first = start // 8 + 1
        places = torch.arange(first, first + len(words), device=tensor.device)
        total += _mixed(words + places.mul_(GAMMA)).sum()
    return total


def octets_of(tensor: Tensor) -> Tensor:
    """The elements' bytes (uint8), in the order of their indices.

    They share the memory of a tensor that is contiguous, and are a copy otherwise.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element is contiguous with any stride.
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8)


def _words(octets: Tensor) -> Tensor:
    """Bytes as integers of 64 bits, filled up with zeros."""
    missing = -octets.numel() % 8
    if missing:
        return torch.cat([octets, octets.new_zeros(missing)]).view(torch.int64)
    if octets.storage_offset() % 8 or octets.data_ptr() % 8:
        octets = octets.clone()
    return octets.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's bijection of each word. `words` is overwritten."""
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        # torch's shift copies the sign; the mask removes the copies.
        words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        words *= factor
    return words


def _host_digest(
    form: str, content: Tensor | np.ndarray[Any, Any] | bytes, deadline: Deadline
) -> bytes:
    """The digest of a content in host memory. Large ones are read without the GIL."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    hasher.update(form.encode("utf-8", "surrogatepass") + b"\0")
    if isinstance(content, bytes):
        hasher.update(content)
        return hasher.digest()
    if isinstance(content, Tensor):
        content = content.detach().resolve_conj().resolve_neg()
    for block in octet_blocks(strided(content)):
        deadline.check()
        hasher.update(block.data)
    return hasher.digest()
