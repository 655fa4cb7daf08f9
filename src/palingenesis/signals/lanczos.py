"""Lanczos iteration on one operator at a time, for processors with caches.

``spectrum.py`` makes its iterations in batches, which is what an accelerator wants. On a processor a matrix
that is worked on alone stays in the cache from the second product on, each of which then costs a third; and
the residual can be looked at after every step, so that none is made in vain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

# What projection leaves of a vector below which it is rounding, and the space is exhausted.
EXHAUSTED = 4e-6

# How long the random vector is that goes into a known one of length 1. It costs a third of a step, and lets
# directions in that are orthogonal to everything known.
ADMIXTURE = 0.3


class Leading(NamedTuple):
    """Largest Ritz value and its residual norm, ``[]``; the product with its vector, ``[d]``, which is closer
    to the eigenvector than that is itself."""

    value: torch.Tensor
    residual: torch.Tensor
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

    Full reorthogonalisation; the projected operator's lower triangle is what the projection finds anyway.

    Args:
        operator: its product with ``[d]``.
        start: where to begin, ``[d]``.
        least: steps before the residual is looked at.
        most: steps at most.
        aim: residual relative to the value at which to stop.
    """
    most = min(most, start.numel())
    basis, products = start.new_empty(most, start.numel()), start.new_empty(most, start.numel())
    small = start.new_zeros(most, most)
    row = start / torch.linalg.vector_norm(start)
    steps, settled = 0, False
    while not settled:
        basis[steps] = row
        product = products[steps] = operator(row)
        steps += 1
        known = basis[:steps]
        parts = small[steps - 1, :steps].copy_(known.mv(product))
        row = torch.addmv(product, known.mT, parts, alpha=-1)
        row.addmv_(known.mT, known.mv(row), alpha=-1)  # what cancels in the first leaves rounding behind
        length = torch.linalg.vector_norm(row)
        left, size = float(length), float(torch.linalg.vector_norm(parts))
        if not math.isfinite(left + size):
            nothing = torch.full_like(length, math.nan)
            return Leading(nothing, nothing, product)
        settled = steps == most or left <= EXHAUSTED * size
        if settled or steps >= least:
            values, vectors = torch.linalg.eigh(small[:steps, :steps])
            value, vector = values[-1], vectors[:, -1]
            settled = settled or left * abs(float(vector[-1])) <= aim * float(value)
        row /= length
    product = products[:steps].mT.mv(vector)
    errors = torch.addmv(product, basis[:steps].mT, vector, alpha=-float(value))
    return Leading(value, torch.linalg.vector_norm(errors), product)


def admixed(known: torch.Tensor, fresh: torch.Tensor, share: float = ADMIXTURE) -> torch.Tensor:
    """A known direction and a fresh one in a single start: ``[d]``, from ``[d]`` each."""
    length = torch.linalg.vector_norm(known)
    return torch.where(length > 0, known / length, 0.0) + share * fresh / torch.linalg.vector_norm(fresh)


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
