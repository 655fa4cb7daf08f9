"""A small run, tried out for a few steps: what the cases of training code share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.sft.runs import settings

from palingenesis.findings import Finding, Report
from palingenesis.preflight.first_steps import first_steps
from palingenesis.sft.config import TrainConfig


def configured(folder: Path, **changes: Any) -> TrainConfig:
    """A run of a small model with random weights; ``section__option=value`` changes it."""
    folder.mkdir(parents=True, exist_ok=True)
    return TrainConfig(**settings(folder, train__max_steps=100, **changes))


def tried(folder: Path, *, pretrained: bool = False, world_size: int = 1) -> Report:
    """What ``pgs diagnose --mode full`` says of its first steps."""
    outcome = first_steps(configured(folder), pretrained=pretrained, world_size=world_size)
    return report(*outcome.findings)


def report(*findings: Finding) -> Report:
    """Findings of checks that were called one by one."""
    return Report("diagnose", findings)
