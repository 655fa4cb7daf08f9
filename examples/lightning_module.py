"""A Lightning module, watched: python examples/lightning_module.py"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from palingenesis import load_run
from palingenesis.integrations.lightning import HealthCallback

OUT = "pgs_run_lightning"


class Sum(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch), batch.sum(-1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(0)
loader = DataLoader(torch.randn(2048, 16), batch_size=16, shuffle=True)
health = HealthCallback(out=OUT, check_every=5, stop_on="critical", overwrite=True)
trainer = pl.Trainer(
    max_steps=200, accelerator="cpu", callbacks=[health], logger=False, enable_checkpointing=False
)
trainer.fit(Sum(), loader)

run = load_run(OUT)
print(f"{run.verdict}: {run.verdict_sentence}")
print(f"report: {run.folder / 'report.html'}")
