"""Tensors of any layout as the flat tensors that transports work on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import Parameter

from nbdist.errors import UnsupportedCollective, UsageError

__all__ = ["Flat", "check_memory", "is_plain", "unwrapped"]


def unwrapped(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the memory of a tensor or of a subclass.

    Raises:
        UnsupportedCollective: A subclass such as DTensor has no memory of its own.
    """
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        arrived: Tensor = tensor.trigger_wait()
        return unwrapped(arrived)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise UnsupportedCollective(
            f"a {kind.__name__}: expected a tensor with memory of its own; send what "
            "it stands for, as tensor.to_local() or tensor.full_tensor() of a DTensor"
        )
    return tensor.as_subclass(Tensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether a strided tensor is contiguous, without a negative or conjugate bit."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def check_memory(tensor: Tensor) -> None:
    """Raise UsageError for a strided tensor whose storage is not allocated."""
    if not tensor.data_ptr() and tensor.numel():
        raise UsageError(
            f"a tensor of {tensor.numel()} elements on {tensor.device} without memory: "
            "expected one whose storage is allocated"
        )


class Flat:
    """A tensor as a contiguous, one-dimensional one."""

    __slots__ = ("_original", "tensor")

    def __init__(
        self, tensor: Tensor, *, on_host: bool = False, filled: bool = True
    ) -> None:
        """Alias the tensor where its layout allows it, else copy it.

        Args:
            tensor: strided, of any shape.
            on_host: copy a device tensor to the host.
            filled: whether a copy needs the tensor's values.

        Raises:
            UnsupportedCollective, UsageError: The tensor has no memory.
        """
        tensor = unwrapped(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        self._original: Tensor | None = None
        check_memory(tensor)
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
        """Whether `write_back` copies."""
        return self._original is not None

    def write_back(self) -> None:
        """Copy the received values into the user's tensor."""
        if self._original is not None:
            self._original.copy_(self.tensor.view(self._original.shape))
