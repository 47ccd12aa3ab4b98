"""Tensors of any layout, as transports want them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Flat", "is_plain"]


def is_plain(tensor: Tensor) -> bool:
    """Whether a strided tensor lies densely, its values as its dtype says."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


class Flat:
    """A tensor as the contiguous, one-dimensional one that transports work on."""

    __slots__ = ("_original", "tensor")

    def __init__(
        self, tensor: Tensor, *, on_host: bool = False, filled: bool = True
    ) -> None:
        """Alias the tensor where it can be worked on as it lies, else copy it.

        Args:
            tensor: strided, of any shape.
            on_host: copy a device tensor to the host, once it is computed.
            filled: whether what it holds counts; else a copy is not filled with it.
        """
        if tensor.requires_grad:
            tensor = tensor.detach()
        self._original: Tensor | None = None
        device = torch.device("cpu") if on_host else tensor.device
        if is_plain(tensor) and tensor.device == device:
            self.tensor = tensor if tensor.dim() == 1 else tensor.view(-1)
        else:
            self._original = tensor
            self.tensor = torch.empty(tensor.numel(), dtype=tensor.dtype, device=device)
            if filled:
                self.tensor.view(tensor.shape).copy_(tensor)

    @property
    def is_copy(self) -> bool:
        """Whether `write_back` has something to do."""
        return self._original is not None

    def write_back(self) -> None:
        """Put what was received where the user's tensor really lies."""
        if self._original is not None:
            self._original.copy_(self.tensor.view(self._original.shape))
