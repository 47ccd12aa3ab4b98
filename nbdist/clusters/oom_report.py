"""Reports which rank holds how much of a GPU's memory after it has run out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nbdist.wire import Failure, RankInfo

__all__ = ["describe_card", "explained"]

OUT_OF_MEMORY = "OutOfMemoryError"
Sizes = Mapping[str, int | None]
"""Bytes, as `nbdist.engine.control_handlers.memory` names them."""


def explained(
    failures: Sequence[Failure],
    infos: Sequence[RankInfo],
    ask: Callable[[], Mapping[int, Sizes | None]],
) -> list[Failure]:
    """The failures, each out-of-memory error with a report on its GPU.

    Args:
        infos: Every rank.
        ask: Asks every rank for its sizes; called only if there is such a failure.
    """
    if not any(failure.ename == OUT_OF_MEMORY for failure in failures):
        return list(failures)
    sizes = ask()
    cards = {info.rank: info.device_uuid for info in infos}
    described = []
    for failure in failures:
        card = cards.get(failure.rank)
        if failure.ename == OUT_OF_MEMORY and card is not None:
            sharing = [info for info in infos if info.device_uuid == card]
            text = describe_card(sharing, sizes, failure.rank)
            failure = replace(
                failure,
                evalue=f"{failure.evalue}\n{text}",
                traceback=(*failure.traceback, text) if failure.traceback else (),
            )
        described.append(failure)
    return described


def describe_card(
    sharing: Sequence[RankInfo], sizes: Mapping[int, Sizes | None], short: int
) -> str:
    """A report on the memory of one GPU.

    Args:
        sharing: The ranks on this GPU.
        sizes: The sizes of each rank; None if it did not answer.
        short: The rank that has run out of memory.
    """
    own = sizes.get(short) or {}
    name = sharing[0].device_name or "the GPU"
    total, used = own.get("total"), own.get("used")
    head = f"Memory of {name}, shared by {len(sharing)} ranks"
    if len(sharing) == 1:
        head = f"Memory of {name}"
    if total is not None and used is not None:
        head += f": {_gib(total)}, of which {_gib(total - used)} are free"
    lines = [head]
    held = 0
    for info in sharing:
        answer = sizes.get(info.rank)
        lines.append(f"  rank {info.rank}: {_holding(answer, info)}")
        held += _of_process(answer)
    if used is not None and used > held:
        lines.append(f"  {_gib(used - held)}: other processes, and CUDA itself")
    advice = "a smaller batch, fewer --ranks-per-gpu, or another --gpu-memory"
    if len(sharing) == 1:
        advice = "a smaller batch, or nbdist.memory(growth=True) against fragmentation"
    return "\n".join([*lines, f"What helps: {advice}"])


def _holding(answer: Sizes | None, info: RankInfo) -> str:
    """The memory that one rank holds, as text."""
    if not answer or answer.get("reserved") is None:
        return "does not answer"
    parts = [f"{_gib(answer['reserved'])} held by torch"]
    if answer.get("allocated") is not None:
        parts.append(f"{_gib(answer['allocated'])} of it in tensors")
    if answer.get("process") is not None:
        parts.append(f"{_gib(answer['process'])} in all")
    limit = answer.get("limit") or info.memory_limit
    if limit is not None:
        parts.append(f"at most {_gib(limit)}")
    return ", ".join(parts)


def _of_process(answer: Sizes | None) -> int:
    """Bytes that a rank's process holds, as far as known."""
    if not answer:
        return 0
    return answer.get("process") or answer.get("reserved") or 0


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.2f} GiB"
