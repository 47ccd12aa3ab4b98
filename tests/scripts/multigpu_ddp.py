"""A script for torchrun, as torch's tutorial for several GPUs: DDP and snapshots."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        x = torch.sin(torch.arange(20) * (index + 1.0))
        return x, x[:1] * x[1:2]


class Trainer:
    def __init__(self, model, batches, optimizer, snapshot):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.model = model.to(self.local_rank)
        self.batches, self.optimizer, self.snapshot = batches, optimizer, snapshot
        self.epochs_run = 0
        if os.path.exists(snapshot):
            saved = torch.load(snapshot, map_location=f"cuda:{self.local_rank}")
            self.model.load_state_dict(saved["model"])
            self.epochs_run = saved["epochs"]
            print(f"resumed at epoch {self.epochs_run} on cuda:{self.local_rank}")
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.batches.sampler.set_epoch(epoch)
            total = torch.zeros((), device=self.local_rank)
            for source, targets in self.batches:
                source = source.to(self.local_rank, non_blocking=True)
                targets = targets.to(self.local_rank, non_blocking=True)
                self.optimizer.zero_grad()
                loss = F.mse_loss(self.model(source), targets)
                loss.backward()
                self.optimizer.step()
                total += loss.detach()
            all_reduce(total)
            if self.global_rank == 0:
                print(f"epoch {epoch}: loss {total.item():.6f}")
                state = {"model": self.model.module.state_dict(), "epochs": epoch + 1}
                torch.save(state, self.snapshot)


def main(epochs, snapshot):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group(backend="nccl")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    points = Points()
    batches = DataLoader(
        points,
        batch_size=16,
        pin_memory=True,
        shuffle=False,
        sampler=DistributedSampler(points),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Trainer(model, batches, optimizer, snapshot).train(epochs)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"weights {weights.double().norm().item():.9f} on {weights.device}")
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
