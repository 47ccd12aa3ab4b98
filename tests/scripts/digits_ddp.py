"""A script for torchrun that trains digits with DistributedDataParallel."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--save", default="")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank = int(os.environ["RANK"])
    assert rank == dist.get_rank()
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train = TensorDataset(x[:1500], y[:1500])
    sampler = DistributedSampler(train)
    batches = DataLoader(train, batch_size=16, sampler=sampler)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right.item() / dist.get_world_size():.3f}")
        if args.save:
            torch.save(model.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
