"""nbdist: one Jupyter notebook as a live distributed PyTorch program.

In a notebook, `%load_ext nbdist` and `%dist_start -n 4`; without magics,
`nbdist.Cluster`. In a `%%distributed` cell, `nbdist.all_reduce` and the other functions
of a rank. Names load on first use, so that importing this costs next to nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

_HOMES = {
    "nbdist.cluster.controller": ("Cluster",),
    "nbdist.cluster.workers": (
        "await_workers", "launch_workers", "list_workers", "run_cluster",
        "stop_workers",
    ),
    "nbdist.errors": (
        "CellError", "CellInterrupted", "CellTimeout", "CollectiveMismatch",
        "CollectiveTimeout", "NbdistError", "RankDied", "StartError", "TransferError",
        "UsageError",
    ),
    "nbdist.engine.self": (
        "comm", "device", "local_rank", "log", "rank", "size",
    ),
    "nbdist.engine.script": ("init",),
    "nbdist.collectives": (
        "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier",
        "broadcast", "broadcast_object", "gather", "recv", "reduce", "reduce_scatter",
        "ring_steps", "scatter", "send",
    ),
    "nbdist.training.files": ("load", "save"),
    "nbdist.training.learning_rate": ("scale_lr", "warmup"),
    "nbdist.training.loader": ("loader",),
    "nbdist.training.memory": ("memory",),
    "nbdist.training.sampler": ("Sampler",),
    "nbdist.training.seeds": ("seed_all",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_RANK_HOMES = {
    "nbdist.engine.self", "nbdist.engine.script", "nbdist.collectives",
    *(home for home in _HOMES if home.startswith("nbdist.training.")),
}  # fmt: skip
_RANK_MODULES = ("elastic", "strategies")
_in_notebook = False

__all__ = [
    "__version__", "load_ipython_extension", *sorted({*_HOME_OF, *_RANK_MODULES}),
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _RANK_MODULES:
        return _OnARank(name) if _in_notebook else _load(f"nbdist.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
    if _in_notebook and home in _RANK_HOMES:
        return _only_on_a_rank(name)
    return getattr(_load(home), name)


def _load(module: str) -> Any:
    return importlib.import_module(module)


def _only_on_a_rank(name: str) -> Callable[..., Any]:
    """Stands for a rank's function in the notebook, which has neither MPI nor torch."""

    def refuse(*_args: object, **_kwargs: object) -> Any:
        from nbdist.errors import WrongProcess

        raise WrongProcess(
            f"nbdist.{name} runs on a rank: put it in a %%distributed cell"
        )

    return refuse


class _OnARank:
    """Stands for a rank's module in the notebook."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _only_on_a_rank(f"{self._name}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_RANK_MODULES})


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext nbdist`: register the magics."""
    global _in_notebook
    from nbdist import magics

    _in_notebook = True
    magics.register(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext nbdist`: stop the cluster and remove the magics."""
    from nbdist import magics

    magics.unregister(shell)
