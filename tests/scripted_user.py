"""A reader that gives prepared answers to the ranks' prompts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from nbdist.widgets.user_input import UserInput

__all__ = ["Answer", "Scripted", "end_of_input", "press"]

Answer = str | Callable[[], str]


class Scripted(UserInput):
    """A reader that gives prepared answers, and keeps what the user would see."""

    refusal = ""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.seen: list[str] = []
        self.prompts: list[str] = []

    def show(self, text: str) -> None:
        self.seen += text.splitlines()

    def read(self, prompt: str, *, hidden: bool = False) -> str:
        self.prompts.append(f"{prompt}(hidden)" if hidden else prompt)
        answer = self.answers.pop(0)
        self.seen.append(f"{prompt}{answer if isinstance(answer, str) else '…'}")
        return answer if isinstance(answer, str) else answer()

    def give(self, *answers: Answer) -> Scripted:
        """Prepare answers, and forget what was seen."""
        self.answers, self.seen, self.prompts = [*answers], [], []
        return self

    @property
    def text(self) -> str:
        return "\n".join(self.seen)


def press() -> str:
    """The interrupt button."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
    return ""


def end_of_input() -> str:
    raise EOFError
