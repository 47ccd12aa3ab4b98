"""The cluster of a notebook, and the tables and views that show it."""

from __future__ import annotations

import atexit
import importlib
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import (
    AlreadyRunning,
    CellInterrupted,
    CellTimeout,
    NotRunning,
    StartInterrupted,
    UsageError,
    message_of,
)
from nbdist.ipc.fork_messages import FORKED
from nbdist.ipc.locks import await_all
from nbdist.kernel_versions import untested_torch
from nbdist.widgets import looking
from nbdist.widgets.grid import Grid
from nbdist.widgets.table import Table, bytes_text, seconds_text
from nbdist.wire import format_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.clusters.cluster import Cluster
    from nbdist.clusters.futures import CallFuture
    from nbdist.clusters.kept.kept_cluster import KeptCluster
    from nbdist.clusters.kept.messages import Cell
    from nbdist.telemetry.collector import Collector
    from nbdist.telemetry.value_stream import ValueStream
    from nbdist.widgets.cell_outputs import CellOutputs
    from nbdist.widgets.cell_view import CellView
    from nbdist.widgets.control_comms import ControlComms
    from nbdist.widgets.monitor import Monitor
    from nbdist.widgets.rank_widgets import RankWidgets

__all__ = [
    "BackgroundCell",
    "Session",
    "cluster",
    "metrics",
    "running_cluster",
    "set_notebook_session",
    "to_mlflow",
    "to_wandb",
]

_notebook_session: Session | None = None


def set_notebook_session(session: Session) -> None:
    """Make this session the one that the notebook's magics use."""
    global _notebook_session
    _notebook_session = session


def cluster() -> Cluster:
    """The cluster that `%dist_start` has started. Call it in the notebook.

    Raises:
        NotRunning: No cluster is running in this notebook.
    """
    if _notebook_session is None:
        raise NotRunning(
            "cluster() is the cluster of a notebook: call it in a notebook after "
            "%load_ext nbdist and %dist_start, outside of %%distributed cells; in a "
            "script, use nbdist.Cluster"
        )
    return _notebook_session.cluster


def metrics(name: str | None = None) -> pd.DataFrame:
    """The values that the ranks have logged, as a pandas DataFrame.

    They are those of the notebook's cluster, also after it was stopped. Call it in the
    notebook. A script calls `Cluster.metrics`.

    Args:
        name: The metric to include, such as "loss"; None for all.

    Returns:
        A DataFrame with the columns `metric`, `rank`, `step`, `time` (seconds since the
        epoch), `value`, `low` and `high`. In a long history a row stands for several
        steps: `step` is the first of them, `value` the mean, and `low` and `high` the
        least and the greatest value.

    Raises:
        NotRunning: No cluster was started in this notebook.
        UsageError: No rank has logged this metric, or pandas is not installed.
    """
    from nbdist.telemetry.export import data_frame

    collector = _session_for("metrics").collector
    return data_frame(collector, () if name is None else [name])


def to_wandb(run: Any = None, **options: Any) -> Any:
    """Log what the ranks log to Weights & Biases, until the cluster stops.

    The values so far are included. A metric of a rank is named as "loss/rank0", over
    the metric "step". Call it in the notebook.

    Args:
        run: A run of wandb. Default: one that `wandb.init` begins, and that ends when
            the cluster stops.
        options: Arguments of `wandb.init`, such as `project="first"`.

    Returns:
        The run.

    Raises:
        NotRunning: No cluster is running in this notebook.
        UsageError: wandb is not installed.
    """
    return _session_for("to_wandb").to_wandb(run, **options)


def to_mlflow(run: Any = None) -> Any:
    """Log what the ranks log to MLflow, until the cluster stops.

    The values so far are included. A metric of a rank is named as "loss/rank0". Call it
    in the notebook.

    Args:
        run: A run of MLflow. Default: the active run, or a new one of the default
            experiment, which ends when the cluster stops.

    Returns:
        The run.

    Raises:
        NotRunning: No cluster is running in this notebook.
        UsageError: MLflow is not installed.
    """
    return _session_for("to_mlflow").to_mlflow(run)


def _session_for(function: str) -> Session:
    """The notebook's session.

    Raises:
        NotRunning: There is none.
    """
    if _notebook_session is None:
        raise NotRunning(
            f"{function}() reads the values of the notebook's cluster: call it in a "
            "notebook after %load_ext nbdist and %dist_start, outside of "
            "%%distributed cells"
        )
    return _notebook_session


def running_cluster() -> Cluster | None:
    """The notebook's running cluster; None if there is none, as in a script."""
    return None if _notebook_session is None else _notebook_session.cluster_if_running


CODE_LENGTH = 60
"""The most characters of a cell's first line in `%dist_jobs`."""
MOST_ENDED_CELLS = 50
"""The number of ended cells in the background that are kept for `%dist_jobs`."""


@dataclass
class BackgroundCell:
    """A cell that runs in the background, or has run there."""

    number: int
    """The notebook's In[] number."""
    ranks: str
    code: str
    future: CallFuture[Any]
    is_collected: bool = False
    """Whether `%dist_wait` has returned or raised the outcome."""

    @property
    def state(self) -> str:
        """What the cell does, or how it has ended."""
        if self.future.cancelled():
            return "cancelled before it began"
        seconds = self.future.seconds
        if seconds is None:
            return "waits for its turn"
        if not self.future.done():
            return f"running for {seconds_text(seconds)}"
        error = self.future.exception()
        if error is None:
            return f"finished in {seconds_text(seconds)}"
        if isinstance(error, CellTimeout):
            how = "timed out"
        elif isinstance(error, KeyboardInterrupt):
            how = "interrupted"
        else:
            first_line = message_of(error).partition("\n")[0]
            return f"failed after {seconds_text(seconds)}: {first_line}"
        return f"{how} after {seconds_text(seconds)}"


@dataclass(frozen=True)
class _ToProfile:
    """What `%dist_profile` has requested for the next cell."""

    steps: int
    ranks: Sequence[int]
    path: Path | None
    """None for the default."""


class Session:
    """Holds the notebook's cluster between cells."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._collector: Collector | None = None
        """The values of the last cluster, after it was stopped."""
        self._cells = 0
        self._in_background: dict[int, BackgroundCell] = {}
        """By number, in the order in which they were made."""
        self._monitors: list[Monitor] = []
        self._streams: list[ValueStream] = []
        """Where the values of this cluster are written."""
        self._to_profile: _ToProfile | None = None
        self._outputs: CellOutputs | None = None
        """What a page gets that is loaded while cells run; None without a kernel."""
        self._comms: ControlComms | None = None
        self._widgets: RankWidgets | None = None
        """The widgets that the ranks have made; None where no widget can be shown."""
        atexit.register(self.leave)

    def follow_outputs(self, shell: InteractiveShell | None) -> None:
        """Keep the output of a shell's cells for pages that are loaded later.

        Such a page also reaches the widgets while a cell runs.

        Args:
            shell: A kernel's shell; None to stop.
        """
        from nbdist.widgets.cell_outputs import CellOutputs
        from nbdist.widgets.control_comms import ControlComms

        if self._outputs is not None:
            self._outputs.remove()
        if self._comms is not None:
            self._comms.remove()
        self._outputs = None if shell is None else CellOutputs(shell)
        self._comms = None if shell is None else ControlComms(shell.kernel)  # type: ignore[attr-defined]
        if self._outputs is not None:
            self._outputs.install()
        if self._comms is not None:
            self._comms.install()

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

    def start(
        self,
        n: int | None,
        keep_hours: float | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        """Start this notebook's cluster, and show the progress.

        Args:
            n: The number of ranks; None takes the default.
            keep_hours: The `hours` of a `KeptCluster`; None for a `Cluster`.
            name: The name of a `KeptCluster`; None takes the default.
            options: As for `Cluster`.

        Raises:
            AlreadyRunning: A cluster is running. It is left untouched.
            UsageError, StartError: As for `Cluster`.
        """
        self._check_none_runs()
        if (line := untested_torch()) is not None:
            print(line)
        if keep_hours is not None:
            from nbdist.clusters.kept.kept_cluster import KeptCluster
            from nbdist.clusters.kept.tables import hours_text

            kept = KeptCluster(n, hours=keep_hours, name=name, **options)
            self._take_up(kept, kept.start)
            hours = hours_text(keep_hours)
            print(
                f"{kept.name} is kept: after the notebook's end its ranks run for "
                f"{hours}, and %dist_attach {kept.name} comes back to them"
            )
            return
        if name is not None:
            raise UsageError(f"--name {name} names a cluster that is kept: add --keep")
        from nbdist.clusters.cluster import Cluster

        cluster = Cluster(n, **options)
        self._take_up(cluster, cluster.start)

    def _check_none_runs(self) -> None:
        if self.running:
            raise AlreadyRunning(
                f"a cluster of {self.cluster.size} ranks is running and was left "
                "untouched: use it, or %dist_stop it first"
            )

    def _take_up(self, cluster: Cluster, start: Callable[..., object]) -> None:
        """Start a cluster, and make it this notebook's."""
        from nbdist.widgets.live_text import print_note

        cluster.on_note = cluster.on_wait = print_note
        self._widgets = _widgets_of(cluster)
        if self._widgets is not None:
            cluster.comms = self._widgets
        self.stop()  # the earlier cluster may have ended by itself
        try:
            self._bring_up(cluster, start)
        except KeyboardInterrupt:
            if cluster.running:
                cluster.stop()
            raise StartInterrupted(
                "the start was interrupted, and nothing of it is left"
            ) from None
        self._cluster = cluster
        if self._widgets is not None:
            # The first cell in the background needs it, and is to return at once.
            threading.Thread(
                target=importlib.import_module,
                args=["ipywidgets"],
                name="nbdist-import",
                daemon=True,
            ).start()

    def attach(self, name: str | None, *, by_force: bool = False) -> None:
        """Attach to a kept cluster, and show the cells whose end nobody has seen.

        Args:
            name: The cluster's name; None if there is only one.
            by_force: Detach another notebook that is attached.

        Raises:
            AlreadyRunning: A cluster is running in this notebook, or another notebook
                is attached.
            NotRunning, UsageError, ClusterError: As for `nbdist.attach`.
        """
        self._check_none_runs()
        from nbdist.clusters.kept.clusters import attach
        from nbdist.clusters.kept.tables import attached_text
        from nbdist.widgets.live_text import print_note

        cluster = attach(name, force=by_force)
        cluster.on_note = cluster.on_wait = print_note
        self.stop()  # the earlier cluster may have ended by itself
        self._cluster, self._widgets = cluster, _widgets_of(cluster)
        if self._widgets is not None:
            cluster.comms = self._widgets
            cluster.show_widgets()
        cells = cluster.unseen_cells
        print_note(attached_text(cluster.description, cells))
        for note in cluster.notes:
            print_note(note)
        for cell in cells:
            self._follow(cluster, cell)

    def _follow(self, cluster: KeptCluster, cell: Cell) -> None:
        """Show a cell that another notebook, or an earlier kernel, has sent."""
        self._begin_in_background(
            cell.number,
            cell.ranks,
            cell.code,
            lambda view: cluster.follow(cell, view),
            is_alone=False,
        )

    def detach(self) -> str:
        """Leave a kept cluster to run. Returns a description of it.

        Raises:
            NotRunning: No cluster is running.
            UsageError: The cluster ends with this notebook.
        """
        from nbdist.clusters.kept.kept_cluster import KeptCluster
        from nbdist.clusters.kept.tables import hours_text

        cluster = self.cluster
        if not isinstance(cluster, KeptCluster):
            raise UsageError(
                "this cluster ends with its notebook: only one that %dist_start --keep "
                "has started can be left"
            )
        hours = hours_text(cluster.description.hours)
        self.leave()
        return (
            f"{cluster.name} runs for {hours} without a notebook: %dist_attach "
            f"{cluster.name} comes back to it"
        )

    def stop_kept(self, name: str) -> str:
        """Stop a kept cluster. Returns a description.

        Raises:
            NotRunning, UsageError: As for `nbdist.clusters.kept.clusters.stop_cluster`.
        """
        from nbdist.clusters.kept.clusters import stop_cluster
        from nbdist.clusters.kept.kept_cluster import KeptCluster

        own = self._cluster
        if isinstance(own, KeptCluster) and own.name == name:
            self.stop()
        else:
            stop_cluster(name)
        return f"{name} was stopped"

    def clusters_table(self) -> Table:
        """The kept clusters of this user."""
        from nbdist.clusters.kept.clusters import kept_clusters
        from nbdist.clusters.kept.tables import clusters_table

        return clusters_table(kept_clusters())

    def restart(self) -> None:
        """Stop the cluster, start it with the same options, and run the setup cells."""
        cluster = self.cluster
        self._bring_up(cluster, cluster.restart)

    def scale(self, n: int | None, hosts: str | None, drop: bool) -> str:
        """Change the number of ranks. Returns a description of the change."""
        return self.cluster.scale(n, hosts=hosts, drop=drop)

    def _bring_up(self, cluster: Cluster, start: Callable[..., object]) -> None:
        from nbdist.widgets.start_view import StartView

        with StartView(cluster.size) as view:
            start(view.show)
            view.finish(cluster.ranks, cluster.mpi)

    def stop(self) -> bool:
        """Stop the cluster. Returns whether there was one. Safe to call twice."""
        return self._part(lambda cluster: cluster.stop())

    def leave(self) -> None:
        """Stop the cluster, or detach from one that is kept. Safe to call twice."""
        self._part(lambda cluster: cluster.leave())

    def _part(self, leave: Callable[[Cluster], None]) -> bool:
        """End what shows the cluster, and leave it. Returns whether there was one."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            self._collector = cluster.collector
        self.hide_monitors()
        if cluster is not None:
            leave(cluster)
        self._close_streams(list(self._streams))
        return cluster is not None

    def execute(
        self,
        code: str,
        ranks: Sequence[int] | None,
        timeout_s: float | None,
        number: int,
        setup: bool = False,
        is_alone: bool = False,
        remark: str = "",
    ) -> None:
        """Run a cell on the ranks and show its output as it comes.

        With `is_alone`, the notebook's cell has no other output, and the end of the
        cell brings it into the order of ranks. A cell with a remark, which is shown at
        its end, has no line of a magic.

        Raises:
            CellError: The cell failed on a rank, timed out or was interrupted.
        """
        shown = self._showing(ranks, is_alone=is_alone, remark=remark)
        with self._profiling(number), shown as (cluster, view):
            cluster.execute(
                code,
                ranks,
                timeout_s=timeout_s,
                number=number,
                setup=setup,
                below_magic=not remark,
                observer=view,
            )

    def execute_in_background(
        self,
        code: str,
        ranks: Sequence[int] | None,
        timeout_s: float | None,
        number: int,
        setup: bool = False,
        is_alone: bool = False,
    ) -> None:
        """Run a cell on the ranks, and return at once.

        The output of the notebook's cell shows the ranks' output, and the error.

        Raises:
            UsageError: A rank does not exist, or the time limit is not above 0.
            NotRunning: No cluster is running.
        """
        from nbdist.clusters.options import check_timeout, existing_ranks

        if self._to_profile is not None:
            raise UsageError(
                "a cell in the background is not profiled: run it without -b, or end "
                "the profile with %dist_profile --off"
            )

        cluster = self.cluster
        check_timeout(timeout_s)
        size = cluster.size
        shown = existing_ranks(range(size) if ranks is None else ranks, size)

        def execute(view: CellView) -> object:
            return cluster.execute(
                code,
                ranks,
                timeout_s=timeout_s,
                number=number,
                setup=setup,
                below_magic=True,
                observer=view,
            )

        self._begin_in_background(number, shown, code, execute, is_alone=is_alone)

    def _begin_in_background(
        self,
        number: int,
        ranks: Sequence[int],
        code: str,
        execute: Callable[[CellView], object],
        *,
        is_alone: bool,
    ) -> None:
        """Show a cell in the output of this one while it runs in the background.

        Args:
            number, ranks, code: The cell's.
            execute: Runs the cell, and returns or raises its outcome.
            is_alone: As for `execute_in_background`.
        """
        from nbdist.widgets.live_text import show_error
        from nbdist.widgets.stop_button import StopButton

        cluster = self.cluster
        hint = f"in the background: %dist_interrupt {number} ends In[{number}]"
        view = self._new_view(ranks, hint, is_alone=is_alone)

        def work() -> object:
            try:
                view.begin()
                try:
                    return execute(view)
                finally:
                    button.close()
                    view.close()
            except BaseException as error:
                show_error(error)
                raise

        def end_cancelled(_future: object) -> None:
            if future.cancelled():
                button.close()
                view.announce(f"In[{number}] was cancelled before it began")

        button = StopButton(
            f"nbdist-{id(self)}-stop{self._cells}",
            f"In[{number}]",
            lambda: future.interrupt(),  # another notebook's cell may have the number
        )
        before = cluster.background_calls
        if before:
            names = " and ".join(call.what for call in before)
            view.announce(f"In[{number}] waits for {names}\n{hint}")
        else:
            view.begin()
        future = cluster.in_background(work, f"In[{number}]")
        future.add_done_callback(end_cancelled)
        if self._outputs is not None:
            end_outputs = self._outputs.keep()
            future.add_done_callback(lambda _: end_outputs())
        self._remember(
            BackgroundCell(number, format_ranks(ranks), _first_line(code), future)
        )

    def _remember(self, cell: BackgroundCell) -> None:
        self._in_background[cell.number] = cell
        ended = [n for n, c in self._in_background.items() if c.future.done()]
        for number in ended[:-MOST_ENDED_CELLS]:
            del self._in_background[number]

    def jobs_table(self) -> Table:
        """The cells in the background: those that run, wait, and have ended."""
        rows = [
            [f"In[{each.number}]", each.ranks, each.state, each.code]
            for each in self._in_background.values()
        ]
        caption = "" if rows else "no cell was run in the background"
        return Table(["cell", "ranks", "state", "code"], rows, caption)

    def wait_for(self, numbers: Sequence[int]) -> str:
        """Wait for cells in the background, and raise the error of one that has failed.

        Args:
            numbers: The cells' In[] numbers. If empty, all cells whose outcome was not
                waited for yet, in their order.

        Returns:
            A description of how they have ended.

        Raises:
            CellError: The error of the first cell that has failed, as of `execute`.
            CellInterrupted: The wait was interrupted, or a cell was cancelled.
            UsageError: There is no such cell.
        """
        cells = self._chosen(numbers, lambda cell: not cell.is_collected)
        for cell in cells:
            _wait_for(cell)
        if not cells:
            return "no cell in the background to wait for"
        return "; ".join(f"In[{each.number}] {each.state}" for each in cells)

    def interrupt(self, numbers: Sequence[int]) -> str:
        """Interrupt cells in the background, or cancel those that have not begun.

        Args:
            numbers: The cells' In[] numbers. If empty, the running cell.

        Returns:
            A description of what was done.

        Raises:
            UsageError: There is no such cell.
        """
        cells = self._chosen(numbers, lambda cell: cell.future.running())
        for cell in cells:
            cell.future.interrupt()
        done = [f"In[{c.number}] {_interrupted(c)}" for c in cells]
        return "; ".join(done) or "no cell runs in the background"

    def _chosen(
        self, numbers: Sequence[int], default: Callable[[BackgroundCell], bool]
    ) -> list[BackgroundCell]:
        """The cells in the background with these numbers; if empty, the default's."""
        known = self._in_background
        missing = [number for number in numbers if number not in known]
        if missing:
            names = ", ".join(f"In[{number}]" for number in known) or "no cell"
            raise UsageError(
                f"In[{missing[0]}] was not run in the background, where {names} ran: "
                "%dist_jobs lists them"
            )
        if numbers:
            return [known[number] for number in numbers]
        return [cell for cell in known.values() if default(cell)]

    def run_script(self, path: str, args: Sequence[str], **options: Any) -> None:
        """Run a script on every rank and show its output as it comes.

        Raises:
            CellError: As for `execute`.
            UsageError: As for `Cluster.run_script`, which names the options.
        """
        with self._showing() as (cluster, view):
            cluster.run_script(path, args, observer=view, **options)

    def debug(self, rank: int | None) -> None:
        """Open pdb where the last cell has failed, as of `Cluster.debug`."""
        failed = self.cluster.failed_rank(rank)
        with self._showing([failed]) as (cluster, view):
            cluster.debug(failed, observer=view)

    @contextmanager
    def _showing(
        self, ranks: Sequence[int] | None = None, **options: Any
    ) -> Iterator[tuple[Cluster, CellView]]:
        """Repair the cluster; yield it with a view for the output of its ranks."""
        cluster = self.cluster
        cluster.repair()
        shown = range(cluster.size) if ranks is None else ranks
        view = self._new_view(shown, **options)
        end_outputs = self._outputs.keep() if self._outputs else lambda: None
        try:
            yield cluster, view
        finally:
            view.close()
            end_outputs()

    def _new_view(
        self, ranks: Sequence[int], hint: str = "", **options: Any
    ) -> CellView:
        from nbdist.widgets.cell_view import CellView

        self._cells += 1
        key = f"nbdist-{id(self)}-{self._cells}"
        path = self.cluster.output_folder / f"cell-{self._cells}.txt"
        return CellView(ranks, key, hint, widgets=self._widgets, path=path, **options)

    def complete(self, token: str, line: str, cursor: int) -> list[str]:
        """Completions from rank 0's namespace; none if it does not answer at once."""
        return self.cluster.complete(token, line, cursor) if self.running else []

    def describe(self, name: str, detail: int) -> dict[str, str]:
        """An object's signature and docstring, as of `Cluster.describe`."""
        return self.cluster.describe(name, detail) if self.running else {}

    def show_monitor(self, **options: Any) -> None:
        """Display the live chart of this cluster; in a terminal, a table.

        The table stays at the end of the terminal while later cells run. Output that is
        no terminal gets the latest values.

        Args:
            options: As for `widgets.display.show`.
        """
        from nbdist.widgets.display import latest_values, show
        from nbdist.widgets.live_text import TerminalText, in_notebook

        if in_notebook():
            self._monitors.append(show(self.cluster.collector, **options))
            if self._outputs is not None:
                self._outputs.keep_display()
        elif sys.stdout.isatty():
            from nbdist.widgets.terminal_monitor import TerminalMonitor

            made = TerminalMonitor(self.cluster.collector, options.get("metric", ()))
            TerminalText.above = made.text
            print(made.text(*shutil.get_terminal_size()))
        else:
            print(latest_values(self.cluster.collector, options.get("metric", ())))

    def hide_monitors(self) -> None:
        """Close the live charts, and show no table in the terminal any longer."""
        from nbdist.widgets.live_text import TerminalText

        TerminalText.above = None
        for monitor in self._monitors:
            monitor.close()
        self._monitors.clear()

    def profile_next(
        self, steps: int, ranks: Sequence[int] | None, path: str | None
    ) -> None:
        """Profile the next cell on the ranks, and write its trace.

        Args:
            steps, ranks: As for `Cluster.profiling`.
            path: The trace's file; None for `profile-N.json.gz`, for In[N].

        Raises:
            UsageError: A rank does not exist, `steps` is not 1 or more, or the file
                cannot be.
            NotRunning: No cluster is running.
        """
        from nbdist.clusters.options import existing_ranks
        from nbdist.clusters.profile import check_steps, checked_path

        check_steps(steps)
        size = self.cluster.size
        chosen = existing_ranks(range(size) if ranks is None else ranks, size)
        file = None if path is None else checked_path(path)
        self._to_profile = _ToProfile(steps, chosen, file)

    def profile_nothing(self) -> None:
        """Take back `profile_next`."""
        self._to_profile = None

    @contextmanager
    def _profiling(self, number: int) -> Iterator[None]:
        """Profile the cell of this block if it was requested, and show the profile."""
        requested, self._to_profile = self._to_profile, None
        if requested is None:
            yield
            return
        from IPython.display import display

        profile = None
        try:
            with self.cluster.profiling(requested.steps, requested.ranks) as profile:
                yield
        finally:
            if profile is not None:
                display(profile)
                if profile.ranks:
                    path = requested.path or Path(f"profile-{number}.json.gz")
                    profile.save(path)
                    print(f"the trace is in {path}: open it at https://ui.perfetto.dev")

    def log_to(self, folder: Path) -> None:
        """Write what this cluster's ranks log to TensorBoard's files, until it stops.

        A second folder replaces the first.

        Raises:
            UsageError: As `EventFiles` does.
        """
        from nbdist.telemetry.event_files import EventFiles

        self._write_to(EventFiles(self.cluster.collector, folder))

    def to_wandb(self, run: Any = None, **options: Any) -> Any:
        """Log what this cluster's ranks log to Weights & Biases, until it stops.

        Args, returns, raises: As the function `to_wandb`.
        """
        from nbdist.telemetry.trackers import WandbRun

        begun = WandbRun(self.cluster.collector, run, **options)
        self._write_to(begun)
        return begun.run

    def to_mlflow(self, run: Any = None) -> Any:
        """Log what this cluster's ranks log to MLflow, until it stops.

        Args, returns, raises: As the function `to_mlflow`.
        """
        from nbdist.telemetry.trackers import MlflowRun

        begun = MlflowRun(self.cluster.collector, run)
        self._write_to(begun)
        return begun.run

    def _write_to(self, stream: ValueStream) -> None:
        """Keep a stream until the cluster stops. It replaces one of its kind."""
        kind = type(stream)
        replaced = [each for each in self._streams if isinstance(each, kind)]
        self._close_streams(replaced)
        self._streams.append(stream)

    def _close_streams(self, streams: Sequence[ValueStream]) -> None:
        for stream in streams:
            self._streams.remove(stream)
            if not stream.close():
                print(f"{stream.description}: the last values are not yet written")

    @property
    def collector(self) -> Collector:
        """The values that the ranks of the running or the last cluster have logged.

        Raises:
            NotRunning: No cluster was started.
        """
        if self._cluster is not None:
            return self._cluster.collector
        if self._collector is None:
            raise NotRunning("no cluster was started: start one with %dist_start")
        return self._collector

    def save_metrics(self, path: Path, metrics: Sequence[str] = ()) -> int:
        """Write the logged values to a file, as `telemetry.export.save` does."""
        from nbdist.telemetry.export import save

        return save(self.collector, path, metrics)

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

    def config_table(self) -> Table:
        """Every setting of the cluster, or of the next one if none is running."""
        from nbdist.config import all_settings, read_file

        cluster = self.cluster_if_running
        settings = cluster.settings() if cluster else all_settings(read_file(), {})
        rows = [
            [f"{each.table}.{each.name}", each.value, each.source, each.variable]
            for each in settings
        ]
        of = "the running cluster" if cluster else "the next %dist_start"
        return Table(
            ["setting", "value", "from", "variable"], rows, f"settings of {of}"
        )

    def variables_table(self, pattern: str) -> Table:
        """The ranks' variables by name. Equal values share a row."""
        return looking.variables_table(self.cluster.variables(pattern), pattern)

    def inspect_table(self, expression: str) -> Table | Grid:
        """The value of an expression on all ranks. Equal values share a row."""
        return looking.values_table(expression, self.cluster.look(expression))

    def memory_tables(self, count: int) -> tuple[Table, Table]:
        """The memory that each rank holds, and the `count` largest tensors."""
        # A tensor that is among the largest of one rank may be further down on another.
        reports = self.cluster.memory(max(100, 4 * count))
        tensors = looking.tensors_table(reports, count)
        return looking.memory_table(reports), tensors

    def diff_table(self, expression: str, *, everything: bool = False) -> Table:
        """The leaves of an expression's value that differ between ranks.

        Args:
            everything: Include leaves that are equal.
        """
        comparison = self.cluster.compare(expression)
        return looking.diff_table(expression, comparison, everything=everything)

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


def _widgets_of(cluster: Cluster) -> RankWidgets | None:
    """What shows the widgets of a cluster's ranks; None if nothing can."""
    from nbdist.widgets.live_text import shows_widgets

    if not shows_widgets():
        return None
    from nbdist.widgets.rank_widgets import RankWidgets

    return RankWidgets(cluster.send_comms)


def _wait_for(cell: BackgroundCell) -> None:
    """Wait for a cell in the background; raises its error."""
    number = cell.number
    try:
        await_all([cell.future], None)
    except KeyboardInterrupt:
        raise CellInterrupted(
            f"the wait for In[{number}] was interrupted; it continues in the "
            f"background: %dist_interrupt {number} ends it"
        ) from None
    cell.is_collected = True
    if cell.future.cancelled():
        raise CellInterrupted(f"In[{number}] was cancelled before it began")
    cell.future.result()


def _interrupted(cell: BackgroundCell) -> str:
    """What an interrupt of the cell has done."""
    if cell.future.cancelled() or cell.future.done():
        return cell.state
    return "is interrupted"


def _first_line(code: str) -> str:
    """The first line of a cell that is no comment or import, to recognise it by."""
    lines = [line.strip() for line in code.splitlines()]
    lines = [line for line in lines if line and line[0] != "#"]
    told = [line for line in lines if line.split()[0] not in ("import", "from")]
    line = next(iter(told or lines), "")
    return line if len(line) <= CODE_LENGTH else f"{line[:CODE_LENGTH]}…"


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
