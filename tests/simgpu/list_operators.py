"""Lists the operators of CUDA tensors that run with the CPU's kernels.

`python list_operators.py FILE` writes a dispatch key and an operator a line. It must
run without the simulator's operators.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

LEFT = """
_assert_async _assert_async.msg _copy_from _copy_from_and_resize
_efficientzerotensor _foreach_copy_ _has_compatible_shallow_copy_type
_local_scalar_dense _nested_view_from_buffer _pin_memory _reshape_alias _to_sparse
_to_sparse.sparse_dim alias as_strided copy_ empty.memory_format empty_strided
is_pinned is_set_to item record_stream resize_ set_ set_.source_Storage
set_.source_Storage_storage_offset set_.source_Tensor unfold view view_as_complex
view_as_real zero_
"""
"""Operators that work without a kernel of their own: views, memory, and copies."""
SPARSE = """
_coalesce _sparse_log_softmax _sparse_log_softmax_backward_data _sparse_softmax
_sparse_softmax_backward_data _sparse_sparse_matmul _sparse_sum_backward add.out
addmm addmm.out addmm_ bmm bmm.out hspmm hspmm.out mul.out sspaddmm.out
"""
"""Operators of sparse tensors whose kernels for CPU and CUDA differ."""


def registered(key: str) -> set[str]:
    """The aten operators that have a kernel for a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def main(file: Path) -> None:
    host = registered("CPU") | registered("CompositeExplicitAutograd")
    left, different = set(LEFT.split()), set(SPARSE.split())
    dense = {
        name
        for name in registered("CUDA") & host
        if name not in left and "cudnn" not in name
    }
    sparse = registered("SparseCUDA") & registered("SparseCPU") & different
    lines = [f"CUDA {name}" for name in sorted(dense)]
    lines += [f"SparseCUDA {name}" for name in sorted(sparse)]
    file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
