"""An application of traitlets without what it prepares for options and loggers."""

from __future__ import annotations

import logging
import warnings
from typing import Any

__all__ = ["BareApplication"]


class BareApplication:
    """Mixed into an application that a forked process runs without a command line.

    What it leaves out reads the names of many objects, and so writes to megabytes of
    memory that forked processes share.
    """

    log: Any
    log_level: int

    def parse_command_line(self, argv: object = None) -> None:
        """Do nothing, because there is no command line."""

    def _loop_default(self) -> Any:
        """ipyparallel's default of `loop`.

        It asks for the event loop before there is one, which Python 3.12 deprecates,
        and which is an error under PYTHONWARNINGS=error.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return super()._loop_default()  # type: ignore[misc]

    def _configure_logging(self) -> None:
        """Configure this application's logger, and no other one."""
        # `setLevel` would clear the caches of all loggers. This logger is new.
        self.log.level = self.log_level
        if not self.log.handlers:
            self.log.addHandler(logging.StreamHandler())
