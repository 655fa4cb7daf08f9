"""Largest eigenvalue of a positive semi-definite operator from a few products with it: block Lanczos.

Full reorthogonalisation and Rayleigh-Ritz (Golub and Van Loan, *Matrix Computations*, §10.3). What the
operator is, and when a value is good enough, is the caller's: ``spectrum.py`` and ``lora.py``.
"""

from __future__ import annotations

from copy import copy

import torch

# What projection leaves of a vector below which it is rounding, and the space is exhausted.
EXHAUSTED = 4e-6
SQUARINGS = 14  # of a small matrix, to find its leading eigenvector without a read


class Krylov:
    """Block Lanczos on a positive semi-definite operator, leading dimensions batched.

    Args:
        block: ``[..., b, d]``, where to start; a zero row is allowed.
        narrow: go on with the last row alone.
    """

    def __init__(self, block: torch.Tensor, *, narrow: bool = False) -> None:
        self._basis = _orthonormal(block, block[..., :0, :])
        self._products = block[..., :0, :]
        self._rows, self._then = block.shape[-2], 1 if narrow else block.shape[-2]

    def of(self, chosen: list[int]) -> Krylov:
        """Some of the batch, along its first dimension."""
        part = copy(self)
        part._basis, part._products = self._basis[chosen], self._products[chosen]
        return part

    def next(self) -> torch.Tensor:
        """The rows ``[..., b, d]`` whose products with the operator are wanted."""
        if self._products.shape[-2]:
            self._rows = self._then
            block = _orthonormal(self._products[..., -self._rows :, :], self._basis)
            self._basis = torch.cat([self._basis, block], dim=-2)
        return self._basis[..., -self._rows :, :]

    def absorb(self, product: torch.Tensor) -> None:
        """Take the operator's product with ``next()``."""
        self._products = torch.cat([self._products, product], dim=-2)

    def ritz(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Largest Ritz value and its residual norm, ``[...]``; the product with its vector, ``[..., d]``,
        which is closer to the eigenvector than that is itself."""
        small = (self._basis @ self._products.mT).double()
        value, vector = leading((small + small.mT) / 2)
        vector, value = vector.to(self._basis.dtype).unsqueeze(-2), value.to(self._basis.dtype)
        product = (vector @ self._products).squeeze(-2)
        errors = product - value.unsqueeze(-1) * (vector @ self._basis).squeeze(-2)
        return value, torch.linalg.vector_norm(errors, dim=-1), product


def _orthonormal(block: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
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


def leading(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest eigenvalue, ``[...]``, and its eigenvector, ``[..., k]``, of symmetric ``[..., k, k]`` ≥ 0.

    ``eigh`` asks CUDA whether it worked, which waits; there the matrix is raised to a high power instead
    (relative error of the value below 1e-4: vectors of nearly equal values may be mixed, which is harmless).
    """
    if matrix.device.type == "cpu" and bool(torch.isfinite(matrix).all()):
        values, vectors = torch.linalg.eigh(matrix)
        return values[..., -1], vectors[..., -1]
    return _by_squaring(matrix)


def _by_squaring(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tiny = torch.finfo(matrix.dtype).tiny
    power = matrix
    for _ in range(SQUARINGS):
        power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(tiny)
        power = power @ power
    # Every column of the power is the eigenvector times its component: the largest has the least rounding.
    column = torch.linalg.vector_norm(power, dim=-2).argmax(-1)
    index = column[..., None, None].expand(*power.shape[:-1], 1)
    vector = power.gather(-1, index).squeeze(-1)
    vector = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True).clamp_min(tiny)
    return (vector.unsqueeze(-2) @ matrix @ vector.unsqueeze(-1))[..., 0, 0], vector
