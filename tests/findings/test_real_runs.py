"""Small real trainings under the monitor: their own records, with and without a fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from palingenesis import Monitor, MonitorConfig, load_run
from palingenesis.findings.pathologies import pathologies_of

SEEDS = range(3)


def training(
    folder: Path,
    seed: int,
    *,
    rate: float = 0.02,
    resets: bool = True,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    dtype: torch.dtype = torch.float32,
    foreign: frozenset[int] = frozenset(),
    steps: int = 300,
) -> list[str]:
    """Train a small network on noisy data; what its record shows."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(
        dtype
    )
    teacher = torch.randn(16, 1, generator=generator)
    chosen = optimizer(model.parameters(), lr=rate)  # type: ignore[call-arg]
    # From random weights every layer drifts far.
    config = MonitorConfig(check_every=5, tier2_every=5, tier3_every=20, drift="off")
    with Monitor(model, chosen, out=folder, config=config) as monitor:
        for step in range(1, steps + 1):
            x = torch.randn(32, 16, generator=generator)
            y = torch.tanh(x @ teacher) + 0.3 * torch.randn(32, 1, generator=generator)
            if step in foreign:
                y = y * 40
            if resets:
                chosen.zero_grad()
            loss = (model(x.to(dtype)) - y.to(dtype)).square().mean()
            loss.backward()
            monitor.step(loss)
            chosen.step()
    return [finding.check for finding in pathologies_of(load_run(folder))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_training_that_goes_well_has_no_finding(
    seed: int, optimizer: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    rate = 0.02 if optimizer is torch.optim.SGD else 0.001
    assert training(tmp_path / "run", seed, rate=rate, optimizer=optimizer) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_that_are_never_reset(seed: int, tmp_path: Path) -> None:
    assert "run.no_zero_grad" in training(tmp_path / "run", seed, rate=1e-6, resets=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_learning_rate_that_is_too_high(seed: int, tmp_path: Path) -> None:
    assert "run.lr_too_high" in training(tmp_path / "run", seed, rate=1.2)


@pytest.mark.parametrize("seed", SEEDS)
def test_foreign_batches(seed: int, tmp_path: Path) -> None:
    foreign = frozenset({60, 110, 155, 200, 245, 270})
    assert "run.data_quality" in training(tmp_path / "run", seed, rate=0.001, foreign=foreign)


@pytest.mark.parametrize("seed", SEEDS)
def test_updates_that_round_away(seed: int, tmp_path: Path) -> None:
    found = training(tmp_path / "run", seed, rate=1e-5, optimizer=torch.optim.AdamW, dtype=torch.bfloat16)
    assert "run.updates_lost" in found
