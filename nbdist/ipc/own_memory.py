"""Reads this process's memory where a plain read could end the process.

A page of a mapped file faults with SIGBUS once the file has become shorter, and the
memory of a storage that was freed with SIGSEGV. The kernel reads memory for a process
too, and gives an error instead of a signal: `process_vm_readv`, and where a container
refuses it, a write to a pipe.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from typing import Any

__all__ = [
    "Unreadable",
    "check",
    "check_array",
    "check_buffer",
    "check_tensor",
    "check_values",
    "copy",
    "has_memory",
]

PAGE = os.sysconf("SC_PAGE_SIZE")
PROBES = 8
"""The most pages that `check` reads."""
PIPE_BYTES = 1 << 16
REFUSED = {errno.ENOSYS, errno.EPERM, errno.EACCES}


class Unreadable(RuntimeError):
    """A value's memory cannot be read. The message has the reason."""


class _Part(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def copy(address: int, size: int, into: int) -> None:
    """Copy memory that may not be readable.

    Args:
        address, size: The memory, in bytes.
        into: The address of as much memory that can be written.

    Raises:
        Unreadable: A part of it cannot be read.
    """
    done = 0
    while done < size:
        target = _Part(into + done, size - done)
        count = _read(target, (_Part * 1)(_Part(address + done, size - done)))
        if count <= 0:
            raise Unreadable(_reason(address + done))
        done += count


def check(address: int, size: int) -> None:
    """Check that memory can be read, by some of its pages.

    A file that becomes shorter loses its last pages, which are among them. The whole
    file would take long to read if it is not in memory.

    Raises:
        Unreadable: A page cannot be read.
    """
    if size <= 0:
        return
    last = address + size - 1
    step = max(PAGE, size // PROBES)
    places = [last, *range(address, last, step)]
    found = ctypes.create_string_buffer(len(places))
    parts = (_Part * len(places))(*(_Part(place, 1) for place in places))
    target = _Part(ctypes.addressof(found), len(places))
    done = _read(target, parts)
    if done < len(places):
        raise Unreadable(_reason(places[max(done, 0)]))


def check_buffer(buffer: memoryview) -> None:
    """Check that a contiguous buffer can be read. See `check`."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and buffer.nbytes:
        array = numpy.frombuffer(buffer, numpy.uint8)
        check(array.ctypes.data, array.nbytes)


def check_array(array: Any) -> bool:
    """Check that a numpy array can be read.

    Returns:
        Whether the memory may become unreadable: numpy has not allocated it.

    Raises:
        Unreadable: It cannot.
    """
    import numpy as np

    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, np.ndarray) and base.flags.owndata:
        return False
    if array.size:
        reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
        low = sum(each for each in reach if each < 0)
        high = sum(each for each in reach if each > 0) + array.itemsize
        check(array.ctypes.data + low, high - low)
    return True


def has_memory(kind: Any) -> bool:
    """Whether tensors of this class have memory, as those of FakeTensor have not."""
    torch = sys.modules["torch"]
    return bool(kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__)


def check_tensor(tensor: Any) -> tuple[int, int, bool]:
    """Check that a strided tensor can be read.

    Returns:
        The address of its first element, the bytes that its elements span, and whether
        the memory may become unreadable: torch has not allocated it.

    Raises:
        Unreadable: It has no memory, or less than its shape needs: the storage was
            freed.
    """
    torch = sys.modules["torch"]
    if not has_memory(type(tensor)):
        raise Unreadable("its class has no memory of its own")
    try:
        storage = torch.Tensor.untyped_storage(tensor)
        address, held = storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError) as error:
        # Such as a tensor that has left `torch.func.vmap`.
        raise Unreadable(f"it has no memory of its own ({error})") from error
    width, offset = tensor.element_size(), tensor.storage_offset()
    size = width if tensor.numel() else 0
    if size:
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size += (length - 1) * stride * width
    if size and (not address or offset * width + size > held):
        raise Unreadable(
            f"its storage has {held if address else 0:,} bytes of the "
            f"{offset * width + size:,} that its shape needs: it was freed"
        )
    start = address + offset * width
    if tensor.device.type != "cpu":
        return start, size, False
    is_foreign = not storage.resizable() or storage.is_shared()
    if is_foreign:
        check(start, size)
    return start, size, is_foreign


def check_values(tensor: Any) -> None:
    """Check that what a tensor holds can be read; pass if it holds nothing itself.

    A class that has no memory has tensors of its own, which are checked by themselves.

    Raises:
        Unreadable: It cannot.
    """
    torch = sys.modules["torch"]
    if not has_memory(type(tensor)) or torch.nn.parameter.is_lazy(tensor):
        return
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_meta or tensor.is_nested or tensor.is_mkldnn:
            return
        if tensor.layout == torch.strided:
            check_tensor(tensor)
        elif tensor.layout == torch.sparse_coo:
            check_tensor(tensor._indices())
            check_tensor(tensor._values())
        else:
            check_tensor(tensor.values())


def _read(target: _Part, parts: Any) -> int:
    """Read parts of memory into one; the number of bytes, or -1."""
    if not _is_refused():
        library = _library()
        done: int = library.process_vm_readv(
            os.getpid(), ctypes.byref(target), 1, parts, len(parts), 0
        )
        if done >= 0 or ctypes.get_errno() not in REFUSED:
            return done
    return _read_by_pipe(target, parts)


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.writev.restype = ctypes.c_ssize_t
    return library


@functools.cache
def _is_refused() -> bool:
    """Whether this process may not read itself, as in some containers."""
    if not hasattr(ctypes.CDLL(None), "process_vm_readv"):
        return True
    source, found = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    target = _Part(ctypes.addressof(found), 1)
    parts = (_Part * 1)(_Part(ctypes.addressof(source), 1))
    done: int = _library().process_vm_readv(
        os.getpid(), ctypes.byref(target), 1, parts, 1, 0
    )
    return done != 1


def _read_by_pipe(target: _Part, parts: Any) -> int:
    """As `_read`, for at most as many bytes as a pipe holds."""
    if len(parts) == 1:
        parts = (_Part * 1)(_Part(parts[0].address, min(parts[0].size, PIPE_BYTES)))
    output, source = os.pipe()
    try:
        os.set_blocking(source, False)
        done: int = _library().writev(source, parts, len(parts))
        if done > 0:
            memory = (ctypes.c_char * done).from_address(target.address)
            done = os.readv(output, [memory])
        return done
    finally:
        os.close(output)
        os.close(source)


def _reason(address: int) -> str:
    """Why memory at this address cannot be read."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                span, *_, path = line.rstrip("\n").split(maxsplit=5)
                begin, end = (int(each, 16) for each in span.split("-"))
                if begin <= address < end and path.startswith("/"):
                    return f"its file has become shorter: {path}"
    except (OSError, ValueError):
        pass
    return "its memory cannot be read"
