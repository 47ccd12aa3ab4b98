"""Converts tensors of any layout to the flat tensors that transports use."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import Parameter

from nbdist.errors import UnsupportedCollective, UsageError

__all__ = ["Flat", "check_memory", "check_writable", "is_plain", "unwrapped"]


_WITHOUT_ADDRESSES = frozenset({"lazy", "xla"})
"""Devices whose tensors have no address, because their work may not have begun."""


def unwrapped(tensor: Tensor) -> Tensor:
    """The plain tensor with the memory of a tensor, which may be of a subclass.

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
            f"a {kind.__name__} has no memory of its own: pass an ordinary tensor, "
            "such as tensor.to_local() or tensor.full_tensor() of a DTensor"
        )
    return tensor.as_subclass(Tensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether a strided tensor is contiguous, without a negative or conjugate bit."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def check_memory(tensor: Tensor) -> None:
    """Raise UsageError for a strided tensor whose storage is not allocated."""
    if tensor.device.type in _WITHOUT_ADDRESSES:
        return
    if not tensor.data_ptr() and tensor.numel():
        raise UsageError(
            f"a tensor of {tensor.numel()} elements on {tensor.device} has no memory: "
            "pass a tensor whose storage is allocated"
        )


def check_writable(tensor: Tensor) -> None:
    """Raise UsageError for a tensor in which several elements share memory."""
    # 1 means yes. torch has no public function for this.
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
            "its elements share memory, so that no result can be written to it; pass "
            "tensor.contiguous()"
        )


class Flat:
    """A tensor as a contiguous, one-dimensional tensor."""

    __slots__ = ("_original", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        *,
        writes: bool = False,
        on_host: bool = False,
        filled: bool = True,
    ) -> None:
        """Make a view of the tensor if its layout allows it, else a copy.

        Args:
            tensor: strided, of any shape.
            writes: whether `write_back` will be called.
            on_host: copy a device tensor to the host.
            filled: whether a copy needs the tensor's values.

        Raises:
            UnsupportedCollective, UsageError: The tensor has no memory, or cannot be
                written to.
        """
        tensor = unwrapped(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        self._original: Tensor | None = None
        check_memory(tensor)
        device = torch.device("cpu") if on_host else tensor.device
        if is_plain(tensor) and tensor.device == device:
            flat = tensor if tensor.dim() == 1 else tensor.view(-1)
            if flat.stride(0) != 1:  # at most one element, of which bytes are viewed
                flat = flat.as_strided(flat.shape, (1,))
            self.tensor = flat
        else:
            if writes:
                check_writable(tensor)
            self._original = tensor
            self.tensor = torch.empty(tensor.numel(), dtype=tensor.dtype, device=device)
            if filled:
                self.tensor.view(tensor.shape).copy_(tensor)

    @property
    def is_copy(self) -> bool:
        """Whether `flat` is a copy, so that `write_back` copies it back."""
        return self._original is not None

    @property
    def gpu(self) -> torch.device | None:
        """The GPU to which `write_back` copies; None if it copies to no GPU."""
        original = self._original
        return original.device if original is not None and original.is_cuda else None

    def write_back(self) -> None:
        """Copy the received values into the user's tensor."""
        if self._original is not None:
            self._original.copy_(self.tensor.view(self._original.shape))
