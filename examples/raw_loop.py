"""A training loop of your own, watched: python examples/raw_loop.py"""

import torch
from torch import nn

from palingenesis import Monitor, load_run

OUT = "pgs_run_raw_loop"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with Monitor(model, optimizer, out=OUT, check_every=10, overwrite=True) as monitor:
    for _ in range(300):
        batch = torch.randn(32, 16)
        loss = nn.functional.mse_loss(model(batch), batch.sum(-1, keepdim=True))
        loss.backward()
        monitor.step(loss)  # after backward, before optimizer.step()
        optimizer.step()
        optimizer.zero_grad()

run = load_run(OUT)
print(f"{run.verdict}: {run.verdict_sentence}")
print(f"report: {run.folder / 'report.html'}")
