"""Weights and optimizer of a sharded model in a checkpoint, by torch's distributed checkpoints.

transformers cannot resume a model that it sharded when it loaded it; here that is the model of FSDP2. Every
rank writes and reads its own shards, and may be one of more or fewer than before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from palingenesis.sft.checkpoints import SHARDS


def save_shards(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write every rank's shards. All ranks call it."""
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": states}, storage_writer=FileSystemWriter(folder / SHARDS))


def load_shards(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read every rank's shards into the model and the optimizer. All ranks call it."""
    weights, states = get_state_dict(model, optimizer)
    found: dict[str, Any] = {"model": weights, "optimizer": states}
    load(found, storage_reader=FileSystemReader(folder / SHARDS))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
