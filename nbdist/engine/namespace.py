"""A rank's variables as a whole: what a newcomer gets from one who was there."""

from __future__ import annotations

from typing import Any

from nbdist.engine import codec, shipping
from nbdist.engine.rank import this_rank

__all__ = ["export"]


def export() -> tuple[shipping.Shipment, list[str]]:
    """The user's variables, as far as they can be pickled, and those that cannot.

    They travel together, so that an optimizer still refers to its model's parameters.
    """
    rank = this_rank()
    namespace = rank.shell.user_global_ns
    good, bad = {}, []
    for name, value in _variables().items():
        try:
            codec.dumps(value, namespace)
        except Exception as error:  # noqa: BLE001 - any object may refuse, in any way
            bad.append(f"{name} ({type(value).__name__}: {error})")
        else:
            good[name] = value
    return shipping.load(codec.dumps(good, namespace), rank.run_dir), bad


def _variables() -> dict[str, Any]:
    shell = this_rank().shell
    return {
        name: value
        for name, value in shell.user_ns.items()
        if not name.startswith("_") and name not in shell.user_ns_hidden
    }
