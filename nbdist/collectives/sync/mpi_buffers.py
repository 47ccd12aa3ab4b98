"""Tensors as buffers of MPI."""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import Tensor

__all__ = ["Spec", "moved", "reduced"]

Spec = list[object]
"""mpi4py's [buffer, count, datatype]."""

_BY_SIZE = {
    1: MPI.BYTE,
    2: MPI.INT16_T,
    4: MPI.INT32_T,
    8: MPI.INT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
_NUMBERS = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}


def moved(tensor: Tensor) -> Spec:
    """A contiguous tensor as MPI's buffer of bytes, for a transfer."""
    return [_memory(tensor), tensor.numel(), _BY_SIZE[tensor.element_size()]]


def reduced(tensor: Tensor) -> Spec:
    """A contiguous tensor as MPI's buffer of numbers, for a reduction."""
    return [_memory(tensor), tensor.numel(), _NUMBERS[tensor.dtype]]


def _memory(tensor: Tensor) -> object:
    # By address, because the buffer protocol has neither bfloat16 nor CUDA memory.
    size = tensor.numel() * tensor.element_size()
    return MPI.buffer.fromaddress(tensor.data_ptr(), size)
