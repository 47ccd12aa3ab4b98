"""A rank of two, without MPI: `python rank_of_two.py RANK STORE`.

Rank 1 kills itself before a collective. Rank 0 prints whether it waits in it, and then
what an abort makes of the wait.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def main(rank: int, path: str) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(path, 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    tensor = torch.ones(5, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)
    time.sleep(2)
    print("done" if work.is_completed() else "waits", flush=True)
    dist.distributed_c10d._abort_process_group()
    torch.cuda.synchronize()
    print("released", flush=True)
    os._exit(0)  # its peer is gone: nothing is to be torn down in order


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
