"""What every test shares. torch is imported late: many tests need none."""

from __future__ import annotations

import os

# Two threads on two busy cores cost several times the CPU of one. Set before torch is first imported, and
# inherited by every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing in the tests may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


@pytest.fixture
def torch_seed() -> int:
    """Seeds torch's global generator, for tests that need the same numbers every time."""
    import torch

    seed = 0
    torch.manual_seed(seed)
    return seed
