"""Lanczos iteration on one operator at a time, for processors with caches.

``spectrum.py`` makes its iterations in batches, which is what an accelerator wants. On a processor a matrix
that is worked on alone stays in the cache from the second product on, each of which then costs a third; and
the residual can be looked at after every step, so that none is made in vain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

# What projection leaves of a vector below which it is rounding, and the space is exhausted.
EXHAUSTED = 4e-6
_CANCELLED = 0.1  # of a vector, what is left where it has to be projected twice
_ROOM = 4  # vectors beyond the least that there is memory for from the start

# How long the random vector is that goes into a known one of length 1. It costs a third of a step, and lets
# directions in that are orthogonal to everything known.
ADMIXTURE = 0.3

# Elements of a matrix that is worth working on alone, of one that may then stay in a processor's cache, and
# of a piece that does; vectors whose products with what is in the cache are faster one by one.
ALONE, STAYS, IN_CACHE, FEW = 1 << 14, 1 << 21, 1 << 18, 3
# Norms of a matrix with which squares of its products stay in the range of fp32 without being divided.
IN_RANGE = (1e-3, 1e6)

MORE = 4  # steps from a random start, beyond those from a known one
AGREE = 0.5  # cosine of two directions that count as one
SQUARINGS = 14  # of a small matrix, to find its leading eigenvector without a read


class Leading(NamedTuple):
    """Largest Ritz value and its residual norm; the operator's product with its vector, ``[d]``, which is
    closer to the eigenvector than that is itself; and after how many steps."""

    value: float
    residual: float
    product: torch.Tensor
    steps: int


def lanczos(
    operator: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor,
    *,
    least: int,
    most: int,
    aim: float,
    beat: float = 0.0,
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
        beat: a value below it is given up at the first look.
    """
    most = min(most, start.numel())
    basis = start.new_empty(min(most, least + _ROOM), start.numel())
    room = len(basis)
    parts: list[list[float]] = []
    row, left, look = start, float(torch.linalg.vector_norm(start)) or 1.0, least
    for steps in range(1, most + 1):
        if steps > room:
            basis = torch.cat([basis, torch.empty_like(basis)])
            room = len(basis)
        known = basis[:steps]
        across = known.mT
        row = operator(torch.div(row, left, out=basis[steps - 1]))
        inside = known.mv(row)
        row.addmv_(across, inside, alpha=-1)
        parts.append(inside.tolist())
        size, left = math.hypot(*parts[-1]), float(torch.linalg.vector_norm(row))
        if left < _CANCELLED * size:  # which left rounding behind
            row.addmv_(across, known.mv(row), alpha=-1)
            left = float(torch.linalg.vector_norm(row))
        if not math.isfinite(left + size):
            break
        last = steps == most or left <= EXHAUSTED * size
        if last or steps >= look:
            value, vector = _leading(parts)
            residual = left * abs(vector[-1])
            if last or residual <= aim * value or value < beat:
                inside = torch.tensor([value * part for part in vector], dtype=row.dtype, device=row.device)
                return Leading(value, residual, row.mul_(vector[-1]).addmv_(across, inside), steps)
            # A step mostly halves it, and costs some looks.
            look = steps + (2 if residual > 4 * aim * value else 1)
    return Leading(math.nan, math.nan, row, len(parts))


def _leading(parts: list[list[float]]) -> tuple[float, list[float]]:
    """Largest eigenvalue and its vector of a symmetric matrix, given the rows of its lower triangle."""
    if len(parts) == 1:
        return parts[0][0], [1.0]
    if len(parts) == 2:
        (first,), (between, second) = parts
        half = (first - second) / 2
        angle = math.atan2(between, half) / 2
        return (first + second) / 2 + math.hypot(half, between), [math.cos(angle), math.sin(angle)]
    matrix = np.zeros((len(parts), len(parts)))
    for row, given in zip(matrix, parts, strict=True):
        row[: len(given)] = given
    values, vectors = np.linalg.eigh(matrix)
    return float(values[-1]), vectors[:, -1].tolist()


def by_itself(
    gram: Callable[..., torch.Tensor],
    matrix: torch.Tensor,
    norm: float,
    starts: Sequence[torch.Tensor],
    *,
    least: int,
    most: int,
    aim: float,
) -> Leading:
    """The leading eigenvalue of ``WᵀW/‖W‖²`` for one matrix, which stays in the cache where it fits.

    Args:
        gram: ``spectrum.gram``.
        matrix: W, ``[m, d]``.
        norm: ‖W‖.
        starts: where to begin. From another start than the first, what may have been overlooked is looked for
            with some steps more.
        least, most, aim: as for ``lanczos``.
    """
    norm = norm or 1.0
    # Where products stay in range anyway, the division is left to the end.
    scale = 1.0 if IN_RANGE[0] < norm < IN_RANGE[1] else norm
    if stays := matrix.numel() <= STAYS:
        matrix = matrix.to(starts[0].dtype)  # once, not at every step
        matrix.sum()  # see products

    def operator(row: torch.Tensor) -> torch.Tensor:
        return gram(matrix, row, scale, True) if stays else gram(matrix, row[None], scale)[0]

    found = lanczos(operator, starts[0], least=least, most=most, aim=aim)
    for start in starts[1:]:
        again = lanczos(operator, start, least=found.steps + MORE, most=most, aim=aim, beat=found.value)
        found = found if again.value < found.value else again
    # A norm beyond the products' range would pass for a matrix of zeros.
    square = (norm / scale) ** 2 if norm <= torch.finfo(starts[0].dtype).max else math.nan
    return found._replace(value=found.value / square, residual=found.residual / square)


def product(matrix: torch.Tensor, row: torch.Tensor, scale: float) -> torch.Tensor:
    """``WᵀW · row / scale²`` for a matrix in the cache."""
    inside = matrix.mv(row)
    return matrix.mT.mv(inside) if scale == 1.0 else matrix.mT.mv(inside.div_(scale)).div_(scale)


def by_single_rows(matrix: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether ``products`` is the fastest way."""
    single = matrix.device.type == "cpu" and matrix.dim() == 2
    return single and matrix.numel() >= ALONE and rows.shape[-2] <= FEW


def products(matrix: torch.Tensor, rows: torch.Tensor, scale: float, length: int) -> torch.Tensor:
    """``rows · WᵀW / scale²`` for a few rows, a slice of W at a time.

    Args:
        matrix: W, ``[m, d]``.
        rows: ``[b, d]``.
        scale: what to divide by, twice.
        length: the most rows of a slice.
    """
    in_pieces = matrix.stride(-1) == 1
    if in_pieces:
        length = max(1, min(length, IN_CACHE // matrix.shape[-1]))
    result = torch.zeros_like(rows)
    for piece in matrix.split(length, dim=-2):
        piece = piece.to(rows.dtype)
        if in_pieces:
            piece.sum()  # a stream that a processor reads ahead: products twice as fast make up for it
        for row, total in zip(rows.unbind(), result.unbind(), strict=True):
            total.addmv_(piece.mT, piece.mv(row).div_(scale))
    return result.div_(scale)


def admixed(block: torch.Tensor, *, longer: bool = False) -> torch.Tensor:
    """A known direction, of length 1 or 0, and a share of a fresh one in a single start, ``[d]``.

    Args:
        block: both, ``[2, d]``.
        longer: as much of the fresh one as of the other.
    """
    share = 1.0 if longer else ADMIXTURE
    return torch.add(block[0], block[1], alpha=share / float(torch.linalg.vector_norm(block[1])))


def direction(vectors: torch.Tensor) -> torch.Tensor:
    """As a start that will do: ``[..., d]`` in bf16."""
    lengths: torch.Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors.div(lengths).to(torch.bfloat16)


def agree(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two directions ``[d]`` of length 1, read on the host, count as one."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return float((one.float() @ other.float()).abs()) >= AGREE


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


def by_squaring(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``spectrum.leading``, without a read: the matrix is raised to a high power."""
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
