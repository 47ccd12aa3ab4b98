"""Collectives among the ranks of a group, on the fastest transport that they have.

A `Group` is a set of ranks. The operations are functions of tensors, with the argument
order and the in-place conventions of torch.distributed.
"""

from __future__ import annotations

# First, because it decides whether the import of mpi4py starts MPI.
from nbdist.collectives import before_mpi  # noqa: F401
from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle, forget_unseen_errors, unseen_errors
from nbdist.collectives.mailbox import Message
from nbdist.collectives.ops.all_gather import all_gather, all_gather_into_tensor
from nbdist.collectives.ops.all_reduce import all_reduce
from nbdist.collectives.ops.all_to_all import all_to_all, all_to_all_single
from nbdist.collectives.ops.barrier import barrier
from nbdist.collectives.ops.broadcast import broadcast
from nbdist.collectives.ops.gather import gather
from nbdist.collectives.ops.objects import all_gather_object, broadcast_object
from nbdist.collectives.ops.point_to_point import irecv, isend, recv, send
from nbdist.collectives.ops.reduce import reduce
from nbdist.collectives.ops.reduce_scatter import reduce_scatter, reduce_scatter_tensor
from nbdist.collectives.ops.scatter import scatter
from nbdist.collectives.reduction import ReduceOp
from nbdist.collectives.registry import (
    any_broken,
    calls_made,
    close_groups,
    current_call,
    default_group,
    release_calls,
    release_calls_with,
    renew_groups,
    set_default_group,
    settle_calls,
    tallies,
)
from nbdist.collectives.signature import Signature, signature
from nbdist.collectives.tolerant_messages import TolerantMessages
from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.ring import RingStep, chunk_bounds, ring_steps

__all__ = [
    "Group",
    "Handle",
    "Message",
    "ReduceOp",
    "RingStep",
    "Signature",
    "TolerantMessages",
    "Transport",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "any_broken",
    "barrier",
    "broadcast",
    "broadcast_object",
    "calls_made",
    "chunk_bounds",
    "close_groups",
    "current_call",
    "default_group",
    "forget_unseen_errors",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "release_calls",
    "release_calls_with",
    "renew_groups",
    "ring_steps",
    "scatter",
    "send",
    "set_default_group",
    "settle_calls",
    "signature",
    "tallies",
    "unseen_errors",
]
