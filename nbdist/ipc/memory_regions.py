"""The memory of the tensors and arrays of a message, each byte of it once.

A view that is pickled adds the range of addresses that it spans. Ranges that overlap
are one region, and the receiving process makes all their views in one buffer. Two views
of one storage that do not overlap are two regions, so that a small view of a large
storage does not send the rest of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["ReceivedRegions", "Regions"]

_ALIGNMENT = 16
"""Bytes of the largest element, a complex128."""


@dataclass(slots=True)
class _Span:
    """The memory between a view's lowest and highest byte."""

    place: str
    """The device whose address space it is."""
    low: int
    high: int
    first: int
    """The address of the first element: not `low` if a stride is negative."""
    view: Any
    layout: tuple[object, ...]
    """The dtype, the shape and the strides."""


class Regions:
    """The memory of the views of one message."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        self._settled: set[Any] = set()

    def settle(self, device: Any) -> None:
        """Wait for the work on a GPU, once for this message.

        A cell may have ended before the kernels of its streams, of which the copy to
        the host would wait for the current one alone.
        """
        if device not in self._settled:
            import torch

            torch.cuda.synchronize(device)
            self._settled.add(device)

    def add_tensor(self, tensor: Any) -> int:
        """Add the memory of a strided tensor, which is not empty and can be read.

        Returns:
            The view's number in the message.
        """
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((count - 1) * step for count, step in steps) + 1
        low, length = tensor.data_ptr(), reach * tensor.element_size()
        layout = tensor.dtype, tensor.shape, tensor.stride()
        return self._add(
            _Span(str(tensor.device), low, low + length, low, tensor, layout)
        )

    def add_array(self, array: Any) -> int:
        """Add the memory of a numpy array, which is not empty. Returns its number."""
        first = array.__array_interface__["data"][0]
        reach = [
            (count - 1) * step
            for count, step in zip(array.shape, array.strides, strict=True)
        ]
        low = first + sum(each for each in reach if each < 0)
        high = first + sum(each for each in reach if each > 0) + array.itemsize
        layout = array.dtype.str, array.shape, array.strides
        return self._add(_Span("cpu", low, high, first, array, layout))

    def _add(self, span: _Span) -> int:
        self._spans.append(span)
        return len(self._spans) - 1

    def frames(self, before: int) -> Iterator[Any]:
        """The regions, and then a table of the views. Nothing if there are no views.

        Args:
            before: The number of the message's buffers that come before them.
        """
        table: list[tuple[int, int, bool]] = [(0, 0, False)] * len(self._spans)
        for number, members in enumerate(self._grouped(), before):
            spans = [self._spans[each] for each in members]
            low, high = spans[0].low, max(span.high for span in spans)
            is_packed = _has_gaps(spans)
            # All views of a buffer must be aligned in it as they are here.
            skipped = low % _ALIGNMENT if len(spans) > 1 and not is_packed else 0
            for each, span in zip(members, spans, strict=True):
                at = 0 if is_packed else span.first - low + skipped
                table[each] = number, at, is_packed
            if is_packed:
                yield _octets(_packed(spans[0].view))
            elif skipped:
                yield bytes(skipped) + bytes(_memory(low, high, spans))
            else:
                yield _memory(low, high, spans)
        if table:
            yield pickle.dumps(table)

    def _grouped(self) -> Iterator[list[int]]:
        """The numbers of the views of each region, in the order of their addresses."""
        spans = self._spans
        order = sorted(
            range(len(spans)), key=lambda each: (spans[each].place, spans[each].low)
        )
        group: list[int] = []
        place, high = "", 0
        for each in order:
            span = spans[each]
            if group and (span.place != place or span.low >= high):
                yield group
                group, high = [], 0
            group.append(each)
            place, high = span.place, max(high, span.high)
        if group:
            yield group


def _has_gaps(spans: list[_Span]) -> bool:
    """Whether the spans are those of one view, which does not use all of its span."""
    first = spans[0]
    is_one = all((each.low, each.layout) == (first.low, first.layout) for each in spans)
    return is_one and first.high - first.low > first.view.nbytes


def _packed(view: Any) -> Any:
    """A contiguous copy of a view."""
    return view.contiguous() if hasattr(view, "contiguous") else view.copy("C")


def _octets(view: Any) -> memoryview:
    """The bytes of a contiguous tensor or array."""
    if hasattr(view, "contiguous"):
        import torch

        # A tensor of one element counts as contiguous whatever its stride is.
        flat = view.cpu().as_strided((view.numel(),), (1,))
        view = flat.view(torch.uint8).numpy()
    import numpy as np

    octets: Any = view.reshape(-1).view(np.uint8)
    return memoryview(octets)


class _Memory:
    """A range of this process's addresses, with the objects that own it."""

    def __init__(self, low: int, high: int, owners: object) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (high - low,),
            "data": (low, False),
        }
        self._owners = owners


def _memory(low: int, high: int, spans: list[_Span]) -> memoryview:
    """The bytes of a region. They are copied only from a GPU."""
    first = spans[0]
    if first.place == "cpu":
        import numpy as np

        owners = [span.view for span in spans]
        octets: Any = np.asarray(_Memory(low, high, owners))
        return memoryview(octets)
    import torch

    storage = first.view.untyped_storage()  # ranges of a GPU overlap within a storage
    octets = torch.empty(0, dtype=torch.uint8, device=first.view.device)
    octets.set_(storage, low - storage.data_ptr(), (high - low,), (1,))
    return _octets(octets)


class _Region:
    """A buffer of a received message."""

    def __init__(self, buffer: Any) -> None:
        is_fixed = memoryview(buffer).readonly
        self.octets: Any = bytearray(buffer) if is_fixed else buffer
        self._storage: Any = None

    def storage(self, on_gpu: bool) -> Any:
        """The buffer as one storage of torch, on this rank's GPU or the CPU."""
        if self._storage is None:
            import torch

            octets = torch.frombuffer(self.octets, dtype=torch.uint8)
            self._storage = (octets.cuda() if on_gpu else octets).untyped_storage()
        return self._storage


class ReceivedRegions:
    """The memory of the views of a received message."""

    def __init__(self, buffers: list[Any], on_host: bool = False) -> None:
        """Take the message's buffers. The last is the table, if there are views."""
        self.on_host = on_host
        """Whether tensors of GPUs come into host memory."""
        self._buffers = buffers
        self._table: list[tuple[int, int, bool]] | None = None
        self._made: dict[int, _Region] = {}

    def find(self, number: int) -> tuple[_Region, int, bool]:
        """The region of a view, the offset of its first element, and if it is packed.

        The offset counts bytes. A packed view is contiguous, whatever its strides were.
        """
        if self._table is None:
            self._table = pickle.loads(self._buffers[-1])
        index, offset, is_packed = self._table[number]
        region = self._made.get(index)
        if region is None:
            region = self._made[index] = _Region(self._buffers[index])
        return region, offset, is_packed
