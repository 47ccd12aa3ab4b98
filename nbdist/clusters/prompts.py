"""Asks the user for the lines that the ranks of a call read."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Protocol

from nbdist.clusters.call import Call
from nbdist.clusters.rank_registry import RankRegistry
from nbdist.errors import NoInput, text_of
from nbdist.ipc import endpoints
from nbdist.ipc.interrupts import defer_interrupts
from nbdist.wire import InputReply, InputRequest, format_ranks, ranks_in

__all__ = ["DebuggerQuit", "Prompts", "Reader", "UserAbsent", "ask_user"]

SAME_RANK_S = 0.5
"""Seconds in which a rank may stop again after a command, such as "next", before
another rank's prompt is shown."""
TOGETHER_S = 0.1
"""Seconds in which further ranks may ask, before the lowest is chosen."""
ENDED_AT_PROMPT = (
    "the rank has ended. If the box for the answer stays, as in JupyterLab, press "
    "Enter in it: no cell runs before"
)
RANKS_USAGE = "ranks all CMD, or ranks 0,2 CMD, with ranks that have stopped"


class Reader(Protocol):
    """Asks the user. Called in the thread that waits for the call."""

    @property
    def refusal(self) -> str:
        """Why nobody can be asked in this thread; "" if the user can."""

    def show(self, text: str) -> None:
        """Show what a debugger has printed."""

    def read(self, prompt: str, *, hidden: bool = False) -> str:
        """Read a line; raises NoInput if nobody can answer, and EOFError at the end."""

    def interrupt_read(self) -> None:
        """Make a `read` that runs raise KeyboardInterrupt. Any thread may call this."""


class UserAbsent(NoInput):
    """No notebook is attached. A debugger then lets its rank go on."""


class DebuggerQuit(Exception):
    """The user has quit the debugger of a rank."""

    def __init__(self, rank: int, location: str) -> None:
        super().__init__(f"the debugger was quit on rank {rank} in {location}")


class Prompts:
    """The prompts of one call: one after another, the lowest rank first.

    Args:
        registry: The ranks of the cluster.
        call: The call whose ranks ask.
        reader: Asks the user.
    """

    def __init__(self, registry: RankRegistry, call: Call, reader: Reader) -> None:
        self._registry, self._call, self._reader = registry, call, reader
        self.seconds = 0.0
        """Seconds for which prompts were open."""
        self._headed: dict[int, str] = {}
        """The location of each rank's last heading."""
        self._shown: set[tuple[int, int]] = set()
        """The rank and the token of each request whose text was shown."""
        self._last: int | None = None
        """The rank whose debugger has got the last command."""

    def attend(self) -> None:
        """Ask the user until no rank waits for a line.

        Raises:
            DebuggerQuit: The user has quit a debugger.
            KeyboardInterrupt: The user has pressed the interrupt button.
        """
        while (rank := self._next()) is not None:
            request = self._call.requests[rank]
            if request.kind == "quit":
                raise DebuggerQuit(rank, request.location)
            if refusal := self._reader.refusal:
                self._call.reply(rank, InputReply(refusal=refusal))
            else:
                self._serve(rank, request)

    def _next(self) -> int | None:
        """The rank to ask for; None if none waits."""
        last, self._last = self._last, None
        if last is not None:
            self._await_stop({last}, SAME_RANK_S)
        elif self._call.requests:
            running = {info.rank for info in self._call.unfinished}
            self._await_stop(running, TOGETHER_S)
        waiting = self._call.requests
        return last if last in waiting else min(waiting, default=None)

    def _await_stop(self, ranks: set[int], seconds: float) -> None:
        """Wait until these ranks ask again or have ended, but not for long."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            running = ranks & {info.rank for info in self._call.unfinished}
            if running <= self._call.requests.keys():
                return
            self._call.wait(None, tick_s=left_s)

    def _serve(self, rank: int, request: InputRequest) -> None:
        """Ask the user for one line, and send it."""
        answer = self._ask(rank, request)
        if answer is None:
            self._reader.show(f"[{rank}] {ENDED_AT_PROMPT}")
            self._call.wait(time.monotonic())  # take its end
            return
        is_debugger = request.kind == "debugger"
        if is_debugger and answer.text.split()[:1] == ["ranks"]:
            self._send_to_ranks(answer.text)
            return
        self._call.reply(rank, answer)
        if is_debugger:
            self._last = rank

    def _ask(self, rank: int, request: InputRequest) -> InputReply | None:
        """Ask the user; None if the rank has ended meanwhile."""
        others = [e.rank for e in self._call.unfinished if e.rank != rank]
        asks = "the debugger" if request.kind == "debugger" else "your input"
        if others:
            are = "waits" if len(others) == 1 else "wait"
            self._call.notice(f"rank {format_ranks(others)} {are} for {asks} on {rank}")
        self._call.make_room()
        self._show(rank, request)
        begun = time.monotonic()
        self._registry.tell(endpoints.HOLD_TIMEOUTS, True)
        try:
            return ask_user(
                self._reader,
                f"[{rank}] {request.prompt}",
                lambda end: self._call.on_end(rank, end),
                hidden=request.kind == "getpass",
            )
        except UserAbsent as error:
            if request.kind != "debugger":
                return InputReply(refusal=str(error))
            self._reader.show(f"[{rank}] continue  (no notebook is attached)")
            return InputReply("continue")
        finally:
            self.seconds += time.monotonic() - begun
            self._registry.tell(endpoints.HOLD_TIMEOUTS, False)
            self._call.last_event = time.monotonic()
            if others:
                self._call.notice("")

    def _show(self, rank: int, request: InputRequest) -> None:
        """Show what a debugger has printed, below a heading where it has stopped."""
        key = rank, request.token
        if request.kind != "debugger" or key in self._shown:
            return
        self._shown.add(key)
        lines = [f"[{rank}] {line}" for line in request.text.splitlines()]
        if self._headed.get(rank) != request.location:
            self._headed[rank] = request.location
            info = self._registry[rank]
            lines.insert(
                0,
                f"debugger on rank {rank} of {info.world_size} ({info.host}), "
                f"{request.location}",
            )
        if lines:
            self._reader.show("\n".join(lines))

    def _send_to_ranks(self, line: str) -> None:
        """Send a command to several debuggers, and show each one's answer."""
        call = self._call
        stopped = {r for r, each in call.requests.items() if each.kind == "debugger"}
        found = re.fullmatch(r"\s*ranks\s+(all|\d[\d,\-]*)\s+(\S.*)", line)
        try:
            ranks = set() if found is None else stopped
            if found is not None and found[1] != "all":
                ranks = set(ranks_in(found[1]))
        except ValueError:
            ranks = set()
        if found is None or not ranks or not ranks <= stopped:
            names = format_ranks(stopped)
            self._reader.show(f"{RANKS_USAGE}: rank {names} has stopped")
            return
        for rank in sorted(ranks):
            call.reply(rank, InputReply(found[2]))
        self._await_stop(ranks, SAME_RANK_S)
        call.make_room()
        for rank in sorted(ranks):
            request = call.requests.get(rank)
            if request is not None:
                self._show(rank, request)


def ask_user(
    reader: Reader,
    prompt: str,
    on_end: Callable[[Callable[[], None]], None],
    *,
    hidden: bool = False,
) -> InputReply | None:
    """Read a line from the user, unless the rank ends before.

    Args:
        reader, prompt, hidden: `Reader.read` and its arguments.
        on_end: Takes a function to call when the rank has ended, on any thread.

    Returns:
        The line, or why there is none; None if the rank has ended.

    Raises:
        UserAbsent: No notebook is attached.
        KeyboardInterrupt: The interrupt button was pressed.
    """
    cut = _Cut(reader)
    on_end(cut.end)
    try:
        try:
            line = reader.read(prompt, hidden=hidden)
        finally:
            with defer_interrupts():
                cut.close()
    except KeyboardInterrupt:
        if cut.is_made:
            return None
        raise
    except UserAbsent:
        raise
    except NoInput as error:
        return InputReply(refusal=str(error))
    except EOFError:
        return InputReply(at_end=True)
    except Exception as error:  # noqa: BLE001 - the rank must not wait forever
        return InputReply(refusal=f"the input cannot be read: {text_of(error)}")
    return InputReply(line)


class _Cut:
    """Ends a read from another thread."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._is_open = True
        self.is_made = False
        """Whether the read was ended."""

    def end(self) -> None:
        """End the read, if it has not ended."""
        with self._lock:
            if self._is_open:
                self._is_open, self.is_made = False, True
                self._reader.interrupt_read()

    def close(self) -> None:
        """Note that the read has ended. `end` then does nothing."""
        with self._lock:
            self._is_open = False
