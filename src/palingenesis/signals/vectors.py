"""Numbers of many units in one vector, and products of vectors and matrices: nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from palingenesis.layers import Layers
from palingenesis.signals.sharding import meeting_device

PIECE = 1 << 22  # elements of half precision that are converted at once


def wide(device: torch.device) -> torch.dtype:
    """The widest number that a device has."""
    return torch.float32 if device.type == "mps" else torch.float64


def on_device(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Numbers of the host in the device's widest type."""
    return torch.tensor(numbers, dtype=wide(device), device="cpu").to(device, non_blocking=True)


def spread(
    name: str, found: Sequence[tuple[Sequence[int], torch.Tensor]], layers: Layers
) -> dict[str, torch.Tensor]:
    """As ``packed``, of values that lie together.

    Args:
        name: what they are.
        found: the units' indices and their values ``[n]``, one pair a device.
        layers: whose units.
    """
    meeting = meeting_device(layers) if layers.together else None
    vectors: list[torch.Tensor] = []
    for members, values in found:
        device = meeting or values.device
        index = torch.tensor(members, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        vector = torch.zeros(len(layers.units), dtype=wide(device), device=device)
        vectors.append(vector.index_copy_(0, index, values.to(device, wide(device), non_blocking=True)))
    if meeting is not None and len(vectors) != 1:
        nothing = torch.zeros(len(layers.units), dtype=wide(meeting), device=meeting)
        vectors = [sum(vectors, nothing)]
    return {f"{name}/{number}": vector for number, vector in enumerate(vectors)} if layers.units else {}


def gram(matrix: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``rows · WᵀW / scale²``: ``[..., b, d]``, in the rows' dtype, a slice of W converted at a time.

    Args:
        matrix: W, ``[..., m, d]``.
        rows: ``[..., b, d]``.
        scale: ``[..., 1, 1]``.
    """
    length = max(1, PIECE // max(1, matrix.numel() // max(1, matrix.shape[-2])))
    result = torch.zeros_like(rows)
    for piece in matrix.split(length, dim=-2):
        piece = piece.to(rows.dtype)
        result += ((rows @ piece.mT) / scale) @ piece
    return result / scale
