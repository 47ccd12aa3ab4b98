"""A script whose ranks fail or die in its first runs, as its arguments say."""

import os
import signal
import sys

import torch
import torch.distributed as dist

how, victim, fails = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
limit = int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
dist.init_process_group("gloo")
print(f"run {restarts} of {limit} on {dist.get_rank()}", flush=True)
dist.barrier()
if restarts < fails and dist.get_rank() == victim:
    if how == "raises":
        raise ValueError(f"run {restarts} fails")
    if how == "exits":
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGKILL)
if restarts < fails and dist.get_rank() == (victim + 1) % dist.get_world_size():
    while True:  # waits for nobody: it is interrupted
        pass
x = torch.ones(1)
dist.all_reduce(x)
print(f"sum {x.item():g}")
dist.destroy_process_group()
