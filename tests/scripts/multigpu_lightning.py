"""A script with Lightning's Trainer on two GPUs, as Lightning's guide has it."""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        mean = self.trainer.callback_metrics["loss"].item()
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch}: loss {mean:.6f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(folder):
    L.seed_everything(0, verbose=False)
    x = torch.sin(torch.arange(256 * 20.0)).view(256, 20)
    batches = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=16)
    model = Regression()
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, batches)
    place = trainer.strategy.root_device
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"weights {weights.double().norm().item():.9f} on {place}")


if __name__ == "__main__":
    main(sys.argv[1])
