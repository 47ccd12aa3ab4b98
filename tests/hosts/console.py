"""A Python interpreter on another host, which a test speaks to.

The program half of this file runs there. It executes what it receives, in a namespace
that lasts.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any

__all__ = ["Console"]

LENGTH = struct.Struct("!I")
ANSWER_WITHIN_S = 120.0


class Console:
    """The connection with an interpreter. The end of a `with` block ends it.

    Args:
        argv: The command line that runs this file.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def do(self, code: str) -> str:
        """Execute statements. Returns what they print.

        Raises:
            AssertionError: They raised, or the interpreter has ended.
        """
        self.begin(code)
        return self.result()[0]

    def value(self, expression: str) -> Any:
        """Evaluate an expression, whose value must be of built-in types.

        Raises:
            AssertionError: As for `do`.
        """
        self.begin(f"_value = {expression}")
        return self.result()[1]

    def error(self, code: str) -> str:
        """Execute statements that must raise. Returns the traceback."""
        self.begin(code)
        _, _, raised = self._answer()
        assert raised, f"no error: {code}"
        return raised

    def begin(self, code: str) -> None:
        """Begin to execute statements, without a wait. Call `result` next."""
        assert self._process.stdin is not None
        text = code.encode()
        self._process.stdin.write(LENGTH.pack(len(text)) + text)

    def result(self) -> tuple[str, Any]:
        """Wait for the end of `begin`. Returns what was printed, and `_value`."""
        printed, value, raised = self._answer()
        assert not raised, printed + raised
        return printed, value

    def _answer(self) -> tuple[str, Any, str]:
        assert self._process.stdout is not None
        head = _exactly(self._process.stdout, LENGTH.size)
        assert head is not None, "the interpreter has ended"
        body = _exactly(self._process.stdout, LENGTH.unpack(head)[0])
        assert body is not None
        answer: tuple[str, Any, str] = pickle.loads(body)
        return answer

    def close(self) -> None:
        """End the interpreter, as the end of a notebook's kernel does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()


def _exactly(stream: Any, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            return None
        data += part
    return data


def _serve() -> None:
    """Execute what arrives on standard input, until it closes."""
    import contextlib
    import io
    import os

    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what other processes print must not be between the answers
    space: dict[str, Any] = {"__name__": "__main__"}
    while (head := _exactly(source, LENGTH.size)) is not None:
        code = _exactly(source, LENGTH.unpack(head)[0])
        assert code is not None
        space.pop("_value", None)
        printed, raised = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "<console>", "exec"), space)
        except BaseException:  # noqa: BLE001 - the test gets it
            raised = traceback.format_exc()
        answer = pickle.dumps((printed.getvalue(), space.get("_value"), raised))
        sink.write(LENGTH.pack(len(answer)) + answer)


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder would hide modules
    _serve()
