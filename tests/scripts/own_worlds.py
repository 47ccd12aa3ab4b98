"""A script that starts a world of two processes in each rank, on one port."""

import os
import sys
import threading

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank: int, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    threading.Event().wait(600)  # a training that takes long


if __name__ == "__main__":
    mp.set_start_method("spawn")
    children = [mp.Process(target=train, args=(r, int(sys.argv[1]))) for r in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join()
