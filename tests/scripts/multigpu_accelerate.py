"""A script for `accelerate launch`, as Accelerate's guide has it."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    set_seed(0)
    x = torch.sin(torch.arange(256 * 20.0)).view(256, 20)
    batches = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=16)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model, optimizer, batches, scheduler = accelerator.prepare(
        model, optimizer, batches, scheduler
    )
    for epoch in range(3):
        losses = []
        for source, targets in batches:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(source), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()))
        mean = torch.cat([each.view(-1) for each in losses]).mean().item()
        accelerator.print(f"epoch {epoch}: loss {mean:.6f}")
    accelerator.wait_for_everyone()
    plain = accelerator.unwrap_model(model)
    weights = torch.cat([p.detach().flatten() for p in plain.parameters()])
    print(f"weights {weights.double().norm().item():.9f} on {weights.device}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
