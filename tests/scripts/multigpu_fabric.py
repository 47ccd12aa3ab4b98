"""A script with Lightning's Fabric on two GPUs, as Lightning's guide has it."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = L.Fabric(accelerator="cuda", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.sin(torch.arange(256 * 20.0)).view(256, 20)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    dataset = TensorDataset(x, x[:, :1] * x[:, 1:2])
    batches = fabric.setup_dataloaders(DataLoader(dataset, batch_size=16))
    for epoch in range(3):
        total = torch.zeros((), device=fabric.device)
        for source, targets in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(source), targets)
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach()
        total = fabric.all_reduce(total, reduce_op="sum")
        fabric.print(f"epoch {epoch}: loss {total.item():.6f}")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"weights {weights.double().norm().item():.9f} on {fabric.device}")


if __name__ == "__main__":
    main()
