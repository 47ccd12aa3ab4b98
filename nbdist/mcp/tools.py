"""The tools of the server. Each makes one call of the cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from nbdist.clusters.collective_history import CollectiveHistory, HistoryRow
from nbdist.clusters.failures import is_effect
from nbdist.clusters.kept.clusters import kept_clusters, visit
from nbdist.clusters.kept.visitor import Visitor
from nbdist.clusters.result import CellResult, RankResult
from nbdist.errors import CellError, CellInterrupted, CellTimeout, NbdistError, RankDied
from nbdist.mcp import answers
from nbdist.mcp.expressions import check_reads_only
from nbdist.wire import Failure, RankInfo, Shown

__all__ = ["Tools", "server"]

INSTRUCTIONS = (
    "A cluster of PyTorch processes, the ranks, which a notebook has started with "
    "%dist_start --keep. The ranks run one cell after another, and keep their "
    "variables. To find out why a cell does not end, call collectives, which says in "
    "which call the ranks parted, then status and stacks."
)
WITHOUT_RUN = (
    " The server was started without --allow-run: it runs no cells and ends no ranks. "
    "inspect and diff evaluate an expression, which may run code of the user's."
)
MOST_CHARACTERS = 20_000
"""The most characters of a rank's text in an answer; the first half and the last."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")
IN_THIS_CALL = 0
"""The number of the code that `run` runs: errors name lines of In[0]."""


class Tools:
    """What assistants and scripts can ask.

    Args:
        name: The cluster; None for the only one that is kept.
        allow_run: Whether code may be run, and ranks replaced.
    """

    def __init__(self, name: str | None, *, allow_run: bool = False) -> None:
        self._name, self._allow_run = name, allow_run

    @property
    def reading(self) -> list[Callable[..., Any]]:
        """The tools that run no cell and end no rank."""
        return [
            self.clusters,
            self.status,
            self.stacks,
            self.inspect,
            self.diff,
            self.collectives,
        ]

    @property
    def running(self) -> list[Callable[..., Any]]:
        """The tools that need `allow_run`."""
        return [self.run, self.interrupt, self.replace] if self._allow_run else []

    def clusters(self) -> list[answers.Cluster]:
        """List the kept clusters of this user."""
        with _translated():
            return [
                answers.Cluster(
                    name=each.name,
                    host=each.host,
                    folder=each.folder,
                    ranks=each.size,
                    died=list(each.died),
                    doing=each.doing,
                    notebook=None if each.holder is None else each.holder.pid,
                )
                for each in kept_clusters()
            ]

    def status(self) -> answers.State:
        """Show what each rank does, and where: also while it is blocked or dead."""
        with self._cluster() as cluster:
            states, died = cluster.status(), cluster.died()
            ranks = []
            for info in cluster.infos:
                state, death = states.get(info.rank), died.get(info.rank)
                seen = "" if state or death else cluster.last_seen(info.rank)
                ranks.append(_rank_state(info, state, death, seen))
            doing = cluster.description.doing
            return answers.State(cluster=cluster.name, doing=doing, ranks=ranks)

    def stacks(self, everything: bool = False) -> list[answers.Stack]:
        """Show the Python stack of each rank, also while it is blocked.

        Args:
            everything: Begin with the calls that lead to the user's code.
        """
        with self._cluster() as cluster:
            alike: dict[str, list[int]] = {}
            for rank, stack in cluster.stacks(everything=everything).items():
                alike.setdefault(stack or "", []).append(rank)
            return [answers.Stack(ranks=r, stack=text) for text, r in alike.items()]

    def inspect(self, expression: str) -> answers.Values:
        """Show the value of an expression on all ranks; equal values are one.

        The expression is evaluated beside the cells, for 5 s at most. Properties,
        `__getitem__` and `__repr__` are the user's code, and may change something. The
        random states of Python, numpy and torch on the CPU are restored if no cell
        runs.

        Args:
            expression: Such as model.layers[0].weight.
        """
        with self._cluster() as cluster:
            self._check(expression)
            shown = cluster.look(expression)
            alike: dict[str | Shown, tuple[Shown, list[int]]] = {}
            for rank, each in shown.items():
                if each is not None:
                    key = each if each.uncompared else each.digest
                    alike.setdefault(key, (each, []))[1].append(rank)
            values = [
                answers.Value(ranks=ranks, value=each.text, uncompared=each.uncompared)
                for each, ranks in alike.values()
            ]
            return answers.Values(
                expression=expression,
                is_equal=len(values) == 1 and not values[0].uncompared,
                values=values,
                silent=[rank for rank, each in shown.items() if each is None],
            )

    def diff(self, expression: str) -> answers.Comparison:
        """Compare a value on all ranks, such as a model, bit for bit.

        While a cell runs, the answer does not say by how much values differ.

        Args:
            expression: Such as model.
        """
        with self._cluster() as cluster:
            self._check(expression)
            found = cluster.compare(expression)
            return answers.Comparison(
                expression=expression,
                is_equal=all(leaf.is_equal for leaf in found.leaves)
                and not found.errors,
                leaves=len(found.leaves),
                different=[
                    answers.Leaf(
                        name=leaf.name,
                        form=leaf.form,
                        groups=[list(group) for group in leaf.groups],
                        difference=leaf.difference,
                        uncompared=leaf.uncompared,
                    )
                    for leaf in found.leaves
                    if not leaf.is_equal
                ],
                errors=found.errors,
                were_busy=found.were_busy,
            )

    def collectives(self, count: int = 20) -> answers.Collectives:
        """Show in which collective the ranks parted, and who waits for whom.

        The ranks record their calls in shared memory, so that this also answers while
        ranks are blocked, stopped or dead.

        Args:
            count: The number of calls in the table.
        """
        with self._cluster() as cluster:
            return _collectives(cluster.collectives(count=count))

    def run(
        self, code: str, ranks: list[int] | None = None, timeout_s: float = 60.0
    ) -> answers.Result:
        """Run code on the ranks as a cell, and return its output and errors.

        Every rank has rank, world_size, device, torch, dist and nbdist. The ranks must
        be idle.

        Args:
            code: The cell.
            ranks: The ranks to run it on; null for all.
            timeout_s: Seconds after which the ranks are interrupted.
        """
        with self._idle_cluster() as cluster:
            outcome, message, note = "finished", "", ""
            try:
                result = cluster.execute(
                    code,
                    ranks,
                    timeout_s=timeout_s,
                    number=IN_THIS_CALL,
                )
            except CellError as error:
                if error.result is None:
                    raise
                result, outcome = error.result, _outcome_of(error)
                message, note = _plain(Exception.__str__(error)), error.note
            return _result(result, outcome, message, note)

    def interrupt(self) -> str:
        """Interrupt the cell that the ranks run. They keep their variables."""
        with self._cluster() as cluster:
            doing = cluster.description.doing
            cluster.interrupt()
            return f"{doing} is interrupted" if doing else "no cell runs"

    def replace(self, ranks: list[int]) -> answers.State:
        """End the processes of ranks, also of stopped ones, and start new ones.

        The new processes get the variables of another rank.

        Args:
            ranks: The ranks.
        """
        with self._cluster() as cluster:
            cluster.replace(ranks)
        return self.status()

    def _check(self, expression: str) -> None:
        if not self._allow_run:
            check_reads_only(expression)

    @contextmanager
    def _cluster(self) -> Iterator[Visitor]:
        """The cluster, beside the notebook that is attached to it."""
        with _translated(), visit(self._name) as cluster:
            yield cluster

    @contextmanager
    def _idle_cluster(self) -> Iterator[Visitor]:
        """The cluster, if its ranks run no cell."""
        with self._cluster() as cluster:
            if doing := cluster.description.doing:
                raise ToolError(
                    f"the ranks are busy with {doing}: call status, stacks or "
                    "collectives, which answer meanwhile, and try again when it has "
                    "ended"
                )
            yield cluster


def server(tools: Tools) -> MCPServer:
    """A server with these tools."""
    about = INSTRUCTIONS + ("" if tools.running else WITHOUT_RUN)
    made = MCPServer("nbdist", instructions=about, log_level="WARNING")
    for changes, each in (
        *((False, tool) for tool in tools.reading),
        *((True, tool) for tool in tools.running),
    ):
        hints = ToolAnnotations(
            read_only_hint=not changes, destructive_hint=changes, open_world_hint=False
        )
        made.add_tool(each, annotations=hints)
    return made


@contextmanager
def _translated() -> Iterator[None]:
    """Raise nbdist's errors as those of a tool."""
    try:
        yield
    except NbdistError as error:
        raise ToolError(_plain(f"{type(error).__name__}: {error}")) from error


def _rank_state(
    info: RankInfo, state: dict[str, Any] | None, death: RankDied | None, seen: str
) -> answers.RankState:
    """The state of a rank.

    Args:
        state: Its answer; None if it does not answer.
        death: Its death, if it has died.
        seen: Where it was when it last answered, if it does not.
    """
    fields: dict[str, Any]
    if death is not None:
        fields = {"state": "dead", "ending": death.ending, "died": str(death)}
    elif state is None:
        fields = {"state": "silent", "at": seen}
    else:
        memory = state["memory"]
        fields = {
            "state": "idle" if state["what"] is None else "busy",
            "doing": state["what"] or "",
            "at": state["where"] or "",
            "seconds": state["seconds"],
            "memory_bytes": memory.get("allocated", memory.get("resident")),
        }
    return answers.RankState(
        rank=info.rank, device=info.device, host=info.host, pid=info.pid, **fields
    )


def _collectives(history: CollectiveHistory) -> answers.Collectives:
    row = history.parted
    return answers.Collectives(
        summary=history.summary,
        parted=None if row is None else _parting(row),
        table=repr(history.table),
    )


def _parting(row: HistoryRow) -> answers.Parting:
    def those(state: str) -> list[int]:
        return sorted(
            rank
            for rank, call in row.calls.items()
            if call.state == state and rank not in row.ended
        )

    calls = []
    for ranks in row.kinds.values():
        first = row.calls[ranks[0]]
        calls.append(
            answers.Call(
                ranks=ranks,
                operation=first.operation,
                reduce_op=first.reduce_op,
                root=first.root,
                dtype=first.dtype,
                shape=first.shape,
                device=first.device,
                at=first.location or row.location,
            )
        )
    return answers.Parting(
        name=row.name,
        calls=calls,
        missing=list(row.missing),
        died=sorted(row.ended),
        waiting=those("running"),
        failed=those("failed"),
    )


def _outcome_of(error: CellError) -> str:
    if isinstance(error, CellTimeout):
        return "timed out"
    return "interrupted" if isinstance(error, CellInterrupted) else "failed"


def _result(
    result: CellResult, outcome: str, message: str, note: str
) -> answers.Result:
    return answers.Result(
        outcome=outcome,
        ranks=[_output(each) for each in result],
        failures=[_failure(each) for each in result.failures],
        message=message,
        note=note,
    )


def _output(each: RankResult) -> answers.Output:
    texts = [each.stdout, each.stderr]
    texts += [str(data.get("text/plain", "")) for data in each.outputs]
    stdout, stderr, *displays = [_cut(_plain(text)) for text in texts]
    return answers.Output(
        rank=each.rank,
        stdout=stdout,
        stderr=stderr,
        displays=displays,
        seconds=each.seconds,
        cut=sum(max(0, len(_plain(text)) - MOST_CHARACTERS) for text in texts),
    )


def _failure(failure: Failure) -> answers.Failure:
    return answers.Failure(
        rank=failure.rank,
        error=failure.ename,
        message=_plain(failure.evalue),
        at=failure.location,
        is_effect=is_effect(failure),
        ending=failure.ending,
        traceback=_cut(_plain("\n".join(failure.traceback))),
    )


def _cut(text: str) -> str:
    """A text, without its middle if it is long."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


def _plain(text: str) -> str:
    return ANSI.sub("", text)
