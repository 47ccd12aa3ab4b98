"""What the ranks print and display in a run, kept for its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.cluster.observer import Event, Observer
from nbdist.cluster.result import RankResult

if TYPE_CHECKING:
    from nbdist.cluster.call import Run

__all__ = ["Collected"]


class Collected:
    """Keeps what the ranks print, and passes it on."""

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

    def results(self, run: Run) -> dict[int, RankResult]:
        """Each rank's part of a run of cells that has ended."""
        results = {}
        for rank, process in run.processes.items():
            stdout, stderr = (
                "".join(self._text.get((process, name), []))
                for name in ("stdout", "stderr")
            )
            outputs = self._outputs.get(process, [])
            results[rank] = RankResult(rank, stdout, stderr, outputs)
            answer = run.answers.get(rank)
            if answer is not None and answer.ok:
                results[rank].failure, results[rank].seconds = answer.value
        return results
