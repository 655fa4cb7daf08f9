"""Lanczos iteration on one operator at a time, for processors with caches.

``spectrum.py`` makes its iterations in batches, which is what an accelerator wants. On a processor a matrix
that is worked on alone stays in the cache from the second product on, each of which then costs a third; and
the residual can be looked at after every step, so that none is made in vain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

# What projection leaves of a vector below which it is rounding, and the space is exhausted.
EXHAUSTED = 4e-6
_CANCELLED = 0.1  # of a vector, what is left where it has to be projected twice
_ROOM = 4  # vectors beyond the least that there is memory for from the start

# How long the random vector is that goes into a known one of length 1. It costs a third of a step, and lets
# directions in that are orthogonal to everything known.
ADMIXTURE = 0.3


class Leading(NamedTuple):
    """Largest Ritz value and its residual norm; the operator's product with its vector, ``[d]``, which is
    closer to the eigenvector than that is itself."""

    value: float
    residual: float
    product: torch.Tensor


def lanczos(
    operator: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    *,
    least: int,
    most: int,
    aim: float,
) -> Leading:
    """The leading eigenvalue of a positive semi-definite operator, on the CPU.

    With full reorthogonalisation. The projected operator is what the projection finds anyway, and the
    residual what it leaves of the last product.

    Args:
        operator: its product with ``[d]``, a new tensor.
        start: where to begin, ``[d]``.
        least: steps before the residual is looked at.
        most: steps at most.
        aim: residual relative to the value at which to stop.
    """
    most = min(most, start.numel())
    basis = start.new_empty(min(most, least + _ROOM), start.numel())
    parts: list[list[float]] = []
    row, left = start, float(torch.linalg.vector_norm(start)) or 1.0
    while True:
        if len(parts) == len(basis):
            basis = torch.cat([basis, torch.empty_like(basis)])
        known = basis[: len(parts) + 1]
        row = operator(torch.div(row, left, out=known[-1]))
        inside = known.mv(row)
        row.addmv_(known.mT, inside, alpha=-1)
        parts.append(inside.tolist())
        size, left = math.hypot(*parts[-1]), float(torch.linalg.vector_norm(row))
        if left < _CANCELLED * size:  # which left rounding behind
            row.addmv_(known.mT, known.mv(row), alpha=-1)
            left = float(torch.linalg.vector_norm(row))
        if not math.isfinite(left + size):
            return Leading(math.nan, math.nan, row)
        last = len(parts) == most or left <= EXHAUSTED * size
        if last or len(parts) >= least:
            value, vector = _leading(parts)
            share = float(vector[-1])
            if last or left * abs(share) <= aim * value:
                inside = torch.from_numpy(value * vector).to(row.dtype)
                return Leading(value, left * abs(share), row.mul_(share).addmv_(known.mT, inside))


def _leading(parts: list[list[float]]) -> tuple[float, NDArray[np.float64]]:
    """Largest eigenvalue and its vector of a symmetric matrix, given the rows of its lower triangle."""
    matrix = np.zeros((len(parts), len(parts)))
    for row, given in zip(matrix, parts, strict=True):
        row[: len(given)] = given
    values, vectors = np.linalg.eigh(matrix)
    return float(values[-1]), vectors[:, -1]


def admixed(block: torch.Tensor, share: float = ADMIXTURE) -> torch.Tensor:
    """A known direction, of length 1 or 0, and a share of a fresh one in a single start, ``[d]``.

    Args:
        block: both, ``[2, d]``.
        share: how long the fresh one is to be.
    """
    return torch.add(block[0], block[1], alpha=share / float(torch.linalg.vector_norm(block[1])))


def orthonormal(block: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Rows of ``block`` made orthonormal, to each other and to the basis; 0 where nothing is left of one."""
    rows = block[..., :0, :]
    for row in block.split(1, dim=-2):
        least = EXHAUSTED * torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        against = torch.cat([basis, rows], dim=-2)
        row = row - (row @ against.mT) @ against
        row = row - (row @ against.mT) @ against  # what cancels in the first leaves rounding behind
        rows = torch.cat([rows, _unit(row, least)], dim=-2)
    return rows


def _unit(row: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """A row of length 1; 0 if it is no longer than ``least``; NaN if it holds one."""
    length = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    return torch.where(length <= least, 0.0, row / length)
