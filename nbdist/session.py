"""The cluster of a notebook, and the tables and views that show it."""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbdist.errors import AlreadyRunning, NotRunning
from nbdist.ipc.fork_messages import FORKED
from nbdist.widgets.table import Table, bytes_text, seconds_text
from nbdist.wire import format_ranks

if TYPE_CHECKING:
    from nbdist.cluster.cluster import Cluster
    from nbdist.widgets.cell_view import CellView
    from nbdist.widgets.monitor import Monitor

__all__ = ["Session", "running_cluster", "set_notebook_session"]

_notebook_session: Session | None = None


def set_notebook_session(session: Session) -> None:
    """Make this session the one that the notebook's magics use."""
    global _notebook_session
    _notebook_session = session


def running_cluster() -> Cluster | None:
    """The notebook's running cluster; None if there is none, as in a script."""
    return None if _notebook_session is None else _notebook_session.cluster_if_running


class Session:
    """Holds the notebook's cluster between cells."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._cells = 0
        self._monitors: list[Monitor] = []
        atexit.register(self.stop)

    @property
    def cluster(self) -> Cluster:
        """The running cluster.

        Raises:
            NotRunning: No cluster is running.
        """
        if self._cluster is None:
            raise NotRunning("no cluster is running: start one with %dist_start")
        return self._cluster

    @property
    def cluster_if_running(self) -> Cluster | None:
        """The running cluster; None if there is none."""
        return self._cluster if self.running else None

    @property
    def running(self) -> bool:
        """Whether a cluster is running."""
        return self._cluster is not None and self._cluster.running

    def start(self, n: int | None, **options: Any) -> None:
        """Start this notebook's cluster, and show the progress.

        Args:
            n: The number of ranks; None takes the default.
            options: As for `Cluster`.

        Raises:
            AlreadyRunning: A cluster is running. It is left untouched.
            UsageError, StartError: As for `Cluster`.
        """
        if self.running:
            raise AlreadyRunning(
                f"a cluster of {self.cluster.size} ranks is running and was left "
                "untouched: use it, or %dist_stop it first"
            )
        from nbdist.cluster.cluster import Cluster
        from nbdist.widgets.live_text import print_note

        cluster = Cluster(n, **options)
        cluster.on_note = print_note
        self.stop()  # the earlier cluster may have ended by itself
        self._bring_up(cluster, cluster.start)
        self._cluster = cluster

    def restart(self) -> None:
        """Stop the cluster, start it with the same options, and run the setup cells."""
        cluster = self.cluster
        self._bring_up(cluster, cluster.restart)

    def scale(self, n: int, drop: bool) -> str:
        """Change the number of ranks. Returns a description of the change."""
        return self.cluster.scale(n, drop=drop)

    def _bring_up(self, cluster: Cluster, start: Callable[..., object]) -> None:
        from nbdist.widgets.start_view import StartView

        with StartView(cluster.size) as view:
            start(view.show)
            view.finish(cluster.ranks, cluster.mpi)

    def stop(self) -> bool:
        """Stop the cluster. Returns whether there was one. Safe to call twice."""
        cluster, self._cluster = self._cluster, None
        for monitor in self._monitors:
            monitor.close()
        self._monitors.clear()
        if cluster is None:
            return False
        cluster.stop()
        return True

    def execute(
        self,
        code: str,
        ranks: Sequence[int] | None,
        timeout_s: float | None,
        number: int,
        setup: bool = False,
    ) -> None:
        """Run a cell on the ranks and show its output as it comes.

        Raises:
            CellError: The cell failed on a rank, timed out or was interrupted.
        """
        with self._showing(ranks) as (cluster, view):
            cluster.execute(
                code,
                ranks,
                timeout_s=timeout_s,
                number=number,
                setup=setup,
                observer=view,
            )

    def run_script(self, path: str, args: Sequence[str], **options: Any) -> None:
        """Run a script on every rank and show its output as it comes.

        Raises:
            CellError: As for `execute`.
            UsageError: As for `Cluster.run_script`, which names the options.
        """
        with self._showing() as (cluster, view):
            cluster.run_script(path, args, observer=view, **options)

    @contextmanager
    def _showing(
        self, ranks: Sequence[int] | None = None
    ) -> Iterator[tuple[Cluster, CellView]]:
        """Repair the cluster; yield it with a view for the output of its ranks."""
        from nbdist.widgets.cell_view import CellView

        cluster = self.cluster
        cluster.repair()
        self._cells += 1
        shown = range(cluster.size) if ranks is None else ranks
        view = CellView(shown, f"nbdist-{id(self)}-{self._cells}")
        try:
            yield cluster, view
        finally:
            view.close()

    def complete(self, token: str, line: str, cursor: int) -> list[str]:
        """Completions from rank 0's namespace; none if it does not answer at once."""
        return self.cluster.complete(token, line, cursor) if self.running else []

    def describe(self, name: str, detail: int) -> dict[str, str]:
        """An object's signature and docstring, as of `Cluster.describe`."""
        return self.cluster.describe(name, detail) if self.running else {}

    def show_monitor(self) -> None:
        """Display the live chart of this cluster; in a terminal, the latest values."""
        from nbdist.widgets.display import latest_values, show
        from nbdist.widgets.live_text import in_notebook

        if in_notebook():
            self._monitors.append(show(self.cluster.collector))
        else:
            print(latest_values(self.cluster.collector))

    def status_table(self) -> Table:
        """Every rank's state, also while a cell runs."""
        cluster = self.cluster
        states, died = cluster.status(), cluster.died()
        rows = [
            _status_row(info, states.get(info.rank), died.get(info.rank))
            for info in cluster.infos
        ]
        header = ["rank", "state", "device", "memory", "host", "pid", "transport"]
        mode = (
            "ranks survive the death of another rank"
            if cluster.fault_tolerant
            else "one dead rank ends all ranks; elastic runs restart from a commit"
        )
        starts = _starts_text([info.started for info in cluster.infos])
        caption = f"{cluster.mpi}; {mode}; {starts}"
        refused = cluster.refused(states)
        if refused:
            caption += f"; {_refusals_text(refused)}"
        return Table(header, rows, caption)

    def variables_table(self, pattern: str) -> Table:
        """The ranks' variables by name. Equal values share a row."""
        answers = self.cluster.variables(pattern)
        silent = [rank for rank, answer in answers.items() if answer is None]
        by_name: dict[str, dict[str, list[tuple[int, Any]]]] = {}
        for rank, variables in answers.items():
            for variable in variables or []:
                alike = by_name.setdefault(variable.name, {})
                alike.setdefault(variable.digest, []).append((rank, variable))
        everywhere = len(answers) - len(silent)
        rows = [
            _variable_row(alike, everywhere)
            for name in sorted(by_name)
            for alike in by_name[name].values()
        ]
        header = ["name", "ranks", "type", "shape", "dtype", "device", "value"]
        note = f"rank {format_ranks(silent)} does not answer" if silent else ""
        return Table(header, rows, note)

    def inspect_table(self, expression: str) -> Table:
        """The value of an expression on all ranks. Equal values share a row."""
        alike: dict[str, list[int]] = {}
        for rank, text in self.cluster.inspect(expression).items():
            alike.setdefault(text, []).append(rank)
        rows = [(format_ranks(ranks), text) for text, ranks in alike.items()]
        return Table(["ranks", expression], rows)

    def stacks_text(self, *, everything: bool = False) -> str:
        """Every rank's Python stack. Ranks with equal stacks share one.

        Args:
            everything: Begin with the calls that lead to the user's code.
        """
        alike: dict[str, list[int]] = {}
        for rank, stack in self.cluster.stacks(everything=everything).items():
            text = stack or f"  {self._silence(rank)}"
            alike.setdefault(text, []).append(rank)
        return "\n".join(
            f"rank {format_ranks(ranks)}:\n{text}" for text, ranks in alike.items()
        )

    def _silence(self, rank: int) -> str:
        seen = self.cluster.last_seen(rank)
        text = "does not answer: the process is stopped, or a thread holds the GIL"
        return f"{text}; last seen {seen}" if seen else text


def _starts_text(starts: Sequence[str]) -> str:
    """How many ranks were forked, and why others were not."""
    return "; ".join(
        f"{count} of {len(starts)} ranks {how}"
        if how == FORKED
        else f"{count} of {len(starts)} ranks not forked: {how}"
        for how, count in Counter(starts).items()
    )


def _refusals_text(count: int) -> str:
    messages = "1 message was" if count == 1 else f"{count:,} messages were"
    return f"{messages} refused: wrongly signed, damaged or sent again"


def _status_row(info: Any, state: dict[str, Any] | None, died: object) -> list[object]:
    memory: dict[str, int] = {}
    if died is not None:
        what = "dead"
    elif state is None:
        what = "does not answer"
    elif state["what"] is None:
        what, memory = "idle", state["memory"]
    else:
        duration = seconds_text(state["seconds"])
        what = f"busy: {state['what']} for {duration}, at {state['where']}"
        memory = state["memory"]
    device = f"{info.device} ({info.device_name})" if info.device_uuid else info.device
    used = bytes_text(memory.get("allocated", memory.get("resident")))
    limit = f" of {bytes_text(info.memory_limit)}" if info.memory_limit else ""
    return [
        info.rank, what, device, used + limit, info.host, info.pid, info.transport,
    ]  # fmt: skip


def _variable_row(alike: list[tuple[int, Any]], everywhere: int) -> list[object]:
    variable = alike[0][1]
    ranks = "all" if len(alike) == everywhere else format_ranks(r for r, _ in alike)
    shape = "" if variable.shape is None else tuple(variable.shape)
    return [
        variable.name, ranks, variable.kind, shape, variable.dtype, variable.device,
        variable.value,
    ]  # fmt: skip
