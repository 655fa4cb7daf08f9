"""What all ranks found, where a case wants it on each of them: training itself gathers nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


def of_all_ranks(own: Mapping[str, torch.Tensor]) -> dict[str, NDArray[np.float64]]:
    """``[ranks, …]`` by name: the names that every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {name: tensor.numpy() for name, tensor in own.items()})
    return {name: np.stack([one[name] for one in found]) for name in own if all(name in one for one in found)}
