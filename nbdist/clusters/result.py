"""The result of a cell on each rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.clusters.observer import Event, Observer
from nbdist.wire import Failure, format_ranks

if TYPE_CHECKING:
    from nbdist.clusters.call import Call

__all__ = ["CellResult", "OutputCollector", "RankResult"]


@dataclass
class RankResult:
    """The result of a cell on one rank."""

    rank: int
    stdout: str = ""
    stderr: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """MIME bundles that were displayed, including the last expression's."""
    failure: Failure | None = None
    seconds: float = 0.0
    """Seconds that the cell ran on this rank."""

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass
class CellResult(Collection[RankResult]):
    """The results of a cell on the ranks that ran it.

    `result[2]` is the result on rank 2, `2 in result` says whether rank 2 ran the cell,
    and iterating gives the results in rank order.
    """

    ranks: dict[int, RankResult]
    """The results by rank, in rank order."""
    world_size: int

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return not self.failures

    @property
    def failures(self) -> list[Failure]:
        return [r.failure for r in self.ranks.values() if r.failure is not None]

    def __getitem__(self, rank: int) -> RankResult:
        try:
            return self.ranks[rank]
        except KeyError:
            asked = format_ranks(self.ranks)
            raise KeyError(f"rank {rank!r}: the cell ran on rank {asked}") from None

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[RankResult]:
        return iter(self.ranks.values())

    def __contains__(self, item: object) -> bool:
        """Whether a rank, given by its number, ran the cell; or a result is in this."""
        if isinstance(item, RankResult):
            return item in self.ranks.values()
        return isinstance(item, int) and item in self.ranks


class OutputCollector:
    """Keeps the ranks' output, and passes it on to an observer."""

    def __init__(self, observer: Observer) -> None:
        self._text: dict[tuple[str, str], list[str]] = {}
        self._outputs: dict[str, list[dict[str, Any]]] = {}
        self._observer = observer

    def take(self, event: Event) -> None:
        message = event.output
        if message is None:
            pass
        elif message["msg_type"] == "stream":
            content = message["content"]
            key = event.process, content["name"]
            self._text.setdefault(key, []).append(content["text"])
        elif message["msg_type"] in ("display_data", "execute_result"):
            outputs = self._outputs.setdefault(event.process, [])
            outputs.append(message["content"]["data"])
        self._observer.take(event)

    def due(self) -> float | None:
        return self._observer.due()

    def notice(self, text: str) -> None:
        self._observer.notice(text)

    def make_room(self) -> None:
        self._observer.make_room()

    def results(self, call: Call) -> dict[int, RankResult]:
        """The result of each rank, once the call has ended."""
        results, answers = {}, call.answers
        for rank, process in call.processes.items():
            stdout = "".join(self._text.get((process, "stdout"), []))
            stderr = "".join(self._text.get((process, "stderr"), []))
            outputs = self._outputs.get(process, [])
            results[rank] = RankResult(rank, stdout, stderr, outputs)
            answer = answers.get(rank)
            if answer is not None and answer.ok:
                results[rank].failure, results[rank].seconds = answer.value
        return results
