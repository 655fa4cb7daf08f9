"""Norms computed another way: by numpy in double precision, scaled, with an exact sum of the pieces."""

from __future__ import annotations

import math

import numpy as np
import torch

_PIECE = 1 << 20


def exact_norm(tensor: torch.Tensor | None) -> float:
    """The L2 norm of a dense, strided tensor's elements; 0 for ``None``."""
    if tensor is None:
        return 0.0
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    values = np.abs(tensor.detach().resolve_conj().resolve_neg().to(wide).numpy()).reshape(-1)
    if not values.size:
        return 0.0
    largest = float(values.max())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    pieces = (values[at : at + _PIECE] / largest for at in range(0, values.size, _PIECE))
    return largest * math.sqrt(math.fsum(float(np.dot(piece, piece)) for piece in pieces))
