"""nbdist: one Jupyter notebook as a live distributed PyTorch program.

In a notebook, `%load_ext nbdist` and `%dist_start -n 4`; without magics,
`nbdist.Cluster`. In a `%%distributed` cell, `nbdist.all_reduce` and the other functions
of a rank. Names load on first use, so that importing this costs next to nothing.
"""

from __future__ import annotations

from nbdist import lazy

__version__ = "0.1.0"

TYPE_CHECKING = False  # the parent of each rank does not import `typing`
if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist import (
        elastic as elastic,
        strategies as strategies,
    )
    from nbdist.clusters.cluster import Cluster as Cluster
    from nbdist.clusters.kept.clusters import (
        attach as attach,
        kept_clusters as kept_clusters,
    )
    from nbdist.clusters.kept.kept_cluster import KeptCluster as KeptCluster
    from nbdist.clusters.workers import (
        await_workers as await_workers,
        launch_workers as launch_workers,
        list_workers as list_workers,
        run_cluster as run_cluster,
        stop_workers as stop_workers,
    )
    from nbdist.collectives import (
        all_gather as all_gather,
        all_gather_object as all_gather_object,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        barrier as barrier,
        broadcast as broadcast,
        broadcast_object as broadcast_object,
        gather as gather,
        recv as recv,
        reduce as reduce,
        reduce_scatter as reduce_scatter,
        ring_steps as ring_steps,
        scatter as scatter,
        send as send,
    )
    from nbdist.engine.script import init as init
    from nbdist.engine.rank_api import (
        comm as comm,
        device as device,
        local_rank as local_rank,
        log as log,
        rank as rank,
        size as size,
    )
    from nbdist.errors import (
        CellError as CellError,
        CellInterrupted as CellInterrupted,
        CellTimeout as CellTimeout,
        CollectiveMismatch as CollectiveMismatch,
        CollectiveTimeout as CollectiveTimeout,
        NbdistError as NbdistError,
        RankDied as RankDied,
        StartError as StartError,
        TransferError as TransferError,
        UsageError as UsageError,
    )
    from nbdist.session import (
        cluster as cluster,
        metrics as metrics,
        to_mlflow as to_mlflow,
        to_wandb as to_wandb,
    )
    from nbdist.training.files import (
        load as load,
        save as save,
    )
    from nbdist.training.learning_rate import (
        scale_lr as scale_lr,
        warmup as warmup,
    )
    from nbdist.training.data.loader import loader as loader
    from nbdist.training.memory import memory as memory
    from nbdist.training.replicas import check_replicas as check_replicas
    from nbdist.training.data.sampler import Sampler as Sampler
    from nbdist.training.seeds import seed_all as seed_all
    from nbdist.training.watch import watch as watch
else:
    _homes = {
        "nbdist.clusters.cluster": ("Cluster",),
        "nbdist.clusters.kept.clusters": ("attach", "kept_clusters"),
        "nbdist.clusters.kept.kept_cluster": ("KeptCluster",),
        "nbdist.clusters.workers": (
            "await_workers", "launch_workers", "list_workers", "run_cluster",
            "stop_workers",
        ),
        "nbdist.errors": (
            "CellError", "CellInterrupted", "CellTimeout", "CollectiveMismatch",
            "CollectiveTimeout", "NbdistError", "RankDied", "StartError",
            "TransferError", "UsageError",
        ),
        "nbdist.session": ("cluster", "metrics", "to_mlflow", "to_wandb"),
    }  # fmt: skip
    _on_ranks = {
        "nbdist.engine.rank_api": (
            *("comm", "device", "local_rank", "log", "rank", "size"),
        ),
        "nbdist.engine.script": ("init",),
        "nbdist.collectives": (
            "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier",
            "broadcast", "broadcast_object", "gather", "recv", "reduce",
            "reduce_scatter", "ring_steps", "scatter", "send",
        ),
        "nbdist.training.files": ("load", "save"),
        "nbdist.training.learning_rate": ("scale_lr", "warmup"),
        "nbdist.training.data.loader": ("loader",),
        "nbdist.training.memory": ("memory",),
        "nbdist.training.replicas": ("check_replicas",),
        "nbdist.training.data.sampler": ("Sampler",),
        "nbdist.training.seeds": ("seed_all",),
        "nbdist.training.watch": ("watch",),
        "nbdist": ("elastic", "strategies"),
    }  # fmt: skip
    __getattr__, __dir__, _names = lazy.attach(__name__, _homes, _on_ranks)
    __all__ = ["__version__", "load_ipython_extension", *_names]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext nbdist`: register the magics, and start the fork server.

    On a rank, where a cell may have this line too, it does nothing.
    """
    import os
    import sys

    rank = sys.modules.get("nbdist.engine.rank")
    if rank is not None and rank.is_rank():
        return

    from nbdist.kernel_versions import check_loaded

    check_loaded()  # first: older versions cannot import the magics

    from nbdist import magics
    from nbdist.clusters import fork_server_client
    from nbdist.clusters.launchers.mpiexec import library_of_wheel
    from nbdist.errors import UsageError
    from nbdist.widgets.live_text import shows_widgets

    lazy.refuse_rank_names()
    magics.register(shell)
    try:
        environment = {**os.environ, **library_of_wheel()}
        if not shows_widgets():
            environment["NBDIST_WIDGETS"] = "0"
        fork_server_client.prepare(environment)
    except UsageError as error:  # %dist_start raises it
        print(f"no rank can be started yet: {error}")


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext nbdist`: stop the cluster and the fork server, remove the magics."""
    from nbdist import magics
    from nbdist.clusters import fork_server_client

    magics.unregister(shell)
    fork_server_client.close()
