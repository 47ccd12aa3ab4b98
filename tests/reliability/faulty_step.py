"""A training step in which one rank can have a fault. Runs as a setup cell.

`step(place, fault, victim)` runs the step on every rank. `matrix.py` has the places and
the faults.
"""

import contextlib
import ctypes
import os
import signal
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nbdist


class LeaveCell(Exception):
    """Ends the cell on this rank early, without an error."""


class Probe(nn.Module):
    """Calls `forward_hook` in its forward, and `backward_hook` in its backward."""

    def __init__(self, forward_hook, backward_hook):
        super().__init__()
        self._forward_hook, self._backward_hook = forward_hook, backward_hook

    def forward(self, x):
        self._forward_hook()
        if x.requires_grad:
            x.register_hook(lambda _gradient: self._backward_hook())
        return x


class CallOnCommit:
    """A value of an elastic state that calls a function when a commit copies it."""

    def __init__(self, hook):
        self._hook = hook

    def state_dict(self):
        self._hook()
        return {"value": 1}

    def load_state_dict(self, state):
        pass


def inject(fault, victim):
    """Inject a fault on `victim`. Every rank calls this at the place of the fault."""
    here = nbdist.rank() == victim
    if fault.startswith("wrong"):
        _mismatched(fault, here)
    elif fault == "blocked" and not here:
        print("here")
        threading.Event().wait()
    elif here:
        _ON_VICTIM[fault]()


def _mismatched(fault, here):
    x = torch.ones(5 if here and fault == "wrong shape" else 3)
    if fault == "wrong root":
        nbdist.broadcast(x, src=1 if here else 0)
    else:
        nbdist.all_reduce(x, op="max" if here and fault == "wrong op" else "sum")


def _raise():
    raise ValueError("injected")


def _loop():
    print("here")
    while True:
        pass


def _leave():
    raise LeaveCell


def _blocked():
    print("here")
    nbdist.barrier()


def _stop():
    print("here")
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    threading.Event().wait()  # the output is sent before the process stops


_ON_VICTIM = {
    "raise": _raise,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": _stop,
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "leave": _leave,
    "loop": _loop,
    "blocked": _blocked,
}


def step(place, fault, victim):
    """Run one training step, with a fault on `victim` at `place`."""

    def at(reached):
        return lambda: inject(fault, victim) if reached == place else None

    with contextlib.suppress(LeaveCell):
        _step(at)


def _step(at):
    torch.manual_seed(0)
    layers = [
        nn.Linear(4, 64),
        Probe(at("in forward"), at("in DDP backward")),
        nn.Linear(64, 4),
    ]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    big = torch.ones(4_000_000)
    work = dist.all_reduce(big, async_op=True)
    at("in an all-reduce")()
    work.wait()
    state = nbdist.elastic.State(model=model, wire=CallOnCommit(at("in a commit")))
    state.commit()
    dist.barrier()
