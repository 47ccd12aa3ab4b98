"""Makes the backend "nbdist" known to torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nbdist.collectives.torch_backend.dispatcher import define_operators
from nbdist.collectives.torch_backend.dynamo import skip_in_dynamo
from nbdist.collectives.torch_backend.process_group import NAME, ProcessGroup
from nbdist.collectives.torch_backend.rendezvous import members_of
from nbdist.collectives.torch_backend.torch_functions import replace_functions

__all__ = ["define", "register"]


def register() -> None:
    """Register the backend with torch.distributed. Safe to call twice.

    After it, `dist.init_process_group("nbdist")` works on every rank of a world.
    """
    if NAME.upper() in dist.Backend._plugins:
        return
    # torch may put tensors on each of these devices.
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    define()


def define() -> None:
    """Define what `register` needs, and leave CUDA alone. Safe to call twice.

    A process that forks ranks calls this, so that they share the memory of it.
    """
    replace_functions()
    define_operators()
    skip_in_dynamo()


def _create(options: Any, _: object) -> ProcessGroup:
    """Make a process group on this rank. torch.distributed calls this."""
    if getattr(options, "enable_reconfigure", False):  # since torch 2.14
        place = options.group_rank, options.group_size
        return ProcessGroup(options.store, place, options.timeout)
    ranks = options.global_ranks_in_group
    members = members_of(ranks, options.group_rank, options.group_size)
    owned = members if ranks else None
    return ProcessGroup(options.store, members, options.timeout, owned)
