"""Stable rank ‖W‖_F²/σ_max(W)² of every weight matrix, from a few products with it and its transpose.

σ_max² is the largest eigenvalue of ``WᵀW`` (or ``WWᵀ``, whichever is smaller), found by block Lanczos with
full reorthogonalisation and Rayleigh-Ritz (Golub and Van Loan, *Matrix Computations*, §10.3). The products
are divided by ‖W‖_F on the way, so that the eigenvalue is 1/stable rank itself, and nothing under- or
overflows.

Some eigenvalue lies within the Ritz residual ‖Az − θz‖ of θ, which is never above the largest. A first call
iterates until that bounds the error of σ by 0.5%. Later calls start from the last one's vector, for which
mostly one step does. Another direction that takes the lead brings energy along, which shows in ‖W‖_F and
starts a search from a random vector; one that takes it by little is found by a longer search, of which every
matrix has its turn at each eighth call. On CUDA nothing is read: the steps are fixed, and where the residual
turns out too large, the number is withheld and the next call goes on. On the CPU large matrices are worked on
one after the other (``lanczos.py``), so that each stays in the cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from palingenesis.errors import LayerError
from palingenesis.layers import Layers
from palingenesis.signals import lanczos
from palingenesis.signals.gate import Gate
from palingenesis.signals.stable_ranks import stable_ranks
from palingenesis.signals.values import Values
from palingenesis.signals.weights import (
    Floats,
    Matrix,
    Pair,
    Shards,
    matrices,
    norms_of,
    outside_of_blocks,
    packed,
    unpacked,
)

NAME = "health/stable_rank"

# Largest Ritz residual relative to the eigenvalue, twice the relative error of σ; and what is aimed at where
# looking at it costs nothing: among eigenvalues closer than the residual, a larger one may be overlooked.
TOLERANCE, AIM = 0.01, 0.007
# Steps: of the last call's vector alone; with a random one, and between two looks at the residual; of a
# search; of two random ones where the residual cannot be looked at; and at most.
STILL, WARM, SEARCH, COLD, MOST = 1, 4, 8, 16, 48
SEARCH_EVERY = 8  # calls
PIECE = 1 << 22  # elements of half precision that are converted at once
KEPT_FROM = 1 << 7  # longer side from which on a vector of the shorter one is worth keeping
IN_STEP = 32  # matrices, which share an all-reduce where sharded: bounds the memory of their spaces

_SEED = 0x5EED
_by_squaring = lanczos.by_squaring


class Krylov:
    """Block Lanczos on a positive semi-definite operator, leading dimensions batched.

    Args:
        block: ``[..., b, d]``, where to start; a zero row is allowed.
        narrow: go on with the last row alone.
    """

    def __init__(self, block: torch.Tensor, *, narrow: bool = False) -> None:
        self._basis = lanczos.orthonormal(block, block[..., :0, :])
        self._products = block[..., :0, :]
        self._rows, self._then = block.shape[-2], 1 if narrow else block.shape[-2]

    def next(self) -> torch.Tensor:
        """The rows ``[..., b, d]`` whose products with the operator are wanted."""
        if self._products.shape[-2]:
            self._rows = self._then
            block = lanczos.orthonormal(self._products[..., -self._rows :, :], self._basis)
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


def leading(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest eigenvalue, ``[...]``, and its eigenvector, ``[..., k]``, of symmetric ``[..., k, k]`` ≥ 0.

    ``eigh`` asks CUDA whether it worked, which waits; there the matrix is raised to a high power instead
    (relative error of the value below 1e-4: vectors of nearly equal values may be mixed, which is harmless).
    """
    if matrix.device.type == "cpu" and bool(torch.isfinite(matrix).all()):
        values, vectors = torch.linalg.eigh(matrix)
        return values[..., -1], vectors[..., -1]
    return _by_squaring(matrix)


def gram(
    matrix: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor | float, cached: bool = False
) -> torch.Tensor:
    """``rows · WᵀW / scale²``: ``[..., b, d]``, in the rows' dtype, a slice of W converted at a time.

    Args:
        matrix: W, ``[..., m, d]``.
        rows: ``[..., b, d]``.
        scale: ``[..., 1, 1]``; or a number.
        cached: W is one matrix in the processor's cache, of the row's dtype; the row is ``[d]``.
    """
    if cached:
        return lanczos.product(matrix, rows, float(scale))
    length = max(1, PIECE // max(1, matrix.numel() // max(1, matrix.shape[-2])))
    if lanczos.by_single_rows(matrix, rows):
        return lanczos.products(matrix, rows, float(scale), length)
    result = torch.zeros_like(rows)
    for piece in matrix.split(length, dim=-2):
        piece = piece.to(rows.dtype)
        result += ((rows @ piece.mT) / scale) @ piece
    return result / scale


class _Plan(NamedTuple):
    """Whether to start from the last call's vector, and from how many random ones; for how many steps;
    whether matrices are worked on alone, and then from each start by itself."""

    known: bool
    fresh: int
    steps: int
    search: bool = False
    alone: bool = False
    apart: bool = False


@dataclass(eq=False)
class _Progress:
    """How far the iteration for one matrix, or one stack, has come."""

    matrix: Matrix
    vector: torch.Tensor | None = None
    settled: bool = False
    # Where the call under way went on from; whether the last one found that again.
    before: torch.Tensor | None = None
    lasting: bool = False
    # Last 1/stable rank and squared norm; read on the CPU only.
    value: float = 0.0
    square: float = 0.0

    def plan(self, shards: Shards, norm: torch.Tensor, call: int) -> _Plan:
        """What this call does. Ranks that share a matrix agree without having read the last result."""
        look = not shards.summed and norm.device.type == "cpu"
        before = self.square
        if look:
            self.square = float(norm.square().sum())
        shape = self.matrix.tall().shape
        alone = look and not self.matrix.stacked and shape.numel() >= lanczos.ALONE
        self.before = self.vector if alone else None
        if self.vector is None or self.vector.shape != (*shape[:-2], shape[-1]):
            return _Plan(known=False, fresh=2, steps=WARM if look else COLD)
        still = look and self.settled and is_still(self.value, before, self.square)
        if alone and not (self.lasting or still):  # a random direction by itself is surer to find a new one
            return _Plan(known=True, fresh=1, steps=WARM, alone=True, apart=True)
        if shards.summed or (call + self.matrix.index) % SEARCH_EVERY == 0:
            return _Plan(known=True, fresh=1, steps=SEARCH, search=look, alone=alone)
        if still:
            return _Plan(known=True, fresh=0, steps=STILL, alone=alone)
        # Directions that start together, in one vector, are told apart by one step more.
        steps = WARM + 1 if alone else WARM if look or self.settled else COLD
        return _Plan(known=True, fresh=1, steps=steps, alone=alone)

    def alone(self, plan: _Plan, norm: torch.Tensor, generator: torch.Generator, call: int) -> Pair:
        """Largest eigenvalue and residual, relative to the squared norm, when worked on alone."""
        matrix = self.matrix.tall()
        block = self.start(plan, matrix, generator, call)
        starts = [lanczos.admixed(block, longer=plan.search)] if plan.fresh and not plan.apart else [*block]
        found = lanczos.by_itself(gram, matrix, float(norm), starts, least=plan.steps, most=MOST, aim=AIM)
        self.keep(lanczos.direction(found.product), max(matrix.shape))
        value, residual = norm.new_tensor([found.value, found.residual]).unbind()
        return value, residual

    def compare(self) -> None:
        """Note whether the call has found again what it went on from."""
        self.lasting = lanczos.agree(self.before, self.vector)
        self.before = None

    def keep(self, direction: torch.Tensor, longer_side: int) -> None:
        """Remember where to go on."""
        self.vector = direction if longer_side >= KEPT_FROM else None

    def start(self, plan: _Plan, like: torch.Tensor, generator: torch.Generator, call: int) -> torch.Tensor:
        """Where to begin for a tall matrix: ``[..., b, d]``, the same on every rank."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        known = None
        if self.vector is not None and plan.known:
            known = self.vector.to(dtype, copy=True).to(like.device).unsqueeze(-2).nan_to_num_(0.0)
            if not plan.fresh:
                return known
        generator.manual_seed(zlib.crc32(f"{_SEED} {call} {self.matrix.unit.label}".encode()))
        shape = (*like.shape[:-2], plan.fresh, like.shape[-1])
        block = torch.randn(shape, generator=generator, dtype=dtype, device=like.device)
        return block if known is None else torch.cat([known, block], dim=-2)


def is_still(value: float, before: float, square: float) -> bool:
    """Whether no direction can have overtaken one of σ²/‖W‖² = ``value`` by much, for want of new energy."""
    return abs(square - before) <= value / 2 * before


class _Group:
    """Matrices with equally many columns, whose small products are made together.

    ``members`` are matrices, or one stack; ``norms`` are ``[1, 1]`` each, ``[E, 1, 1]`` of a stack."""

    def __init__(self, members: list[_Progress], tall: list[torch.Tensor], norms: list[torch.Tensor]) -> None:
        self._members, self._tall = members, tall
        self._norms = norms[0] if members[0].matrix.stacked else torch.stack(norms)

    def begin(self, plan: _Plan, generator: torch.Generator, call: int) -> None:
        pairs = zip(self._members, self._tall, strict=True)
        starts = [one.start(plan, matrix, generator, call) for one, matrix in pairs]
        block = starts[0] if self._members[0].matrix.stacked else torch.stack(starts)
        self._scale = torch.where(self._norms == 0, 1.0, self._norms).to(block.dtype)
        self.space = Krylov(block, narrow=plan.search)

    def products(self) -> torch.Tensor:
        """``[..., b, d]``, of this rank's rows."""
        block = self.space.next()
        if self._members[0].matrix.stacked:
            return gram(self._tall[0], block, self._scale)
        terms = zip(self._tall, block.unbind(0), self._scale.unbind(0), strict=True)
        return torch.stack([gram(matrix, rows, scale) for matrix, rows, scale in terms])

    def end(self) -> None:
        """Find what is known so far, and remember where to go on."""
        self._value, self._residual, products = self.space.ritz()
        found = lanczos.direction(products)
        # Of a stack one tensor, of others each its own: a view would keep all of them alive.
        each = [found] if self._members[0].matrix.stacked else [one.clone() for one in found.unbind(0)]
        for one, own, matrix in zip(self._members, each, self._tall, strict=True):
            one.keep(own, max(matrix.shape[-2:]))

    def settled(self) -> bool:
        """Whether no residual is too large; reads the device. A NaN will not get better."""
        return not bool((self._residual > AIM * self._value).any())

    def found(self) -> list[tuple[_Progress, Pair]]:
        """Value and residual of each member."""
        # A norm beyond the products' range would pass for a matrix of zeros.
        value = (self._value + 0 * self._norms.to(self._value.dtype).reshape(self._value.shape)).double()
        residual = self._residual.double()
        if self._members[0].matrix.stacked:  # the worst counts; padded, because a rank may have no expert
            return [(self._members[0], (F.pad(value, (0, 1)).amax(), F.pad(residual, (0, 1)).amax()))]
        return list(zip(self._members, zip(value.unbind(), residual.unbind(), strict=True), strict=True))


def _grouped(members: list[tuple[_Progress, torch.Tensor]]) -> list[_Group]:
    """Matrices with equally many columns together; every stack by itself."""
    groups: dict[tuple[object, ...], list[tuple[_Progress, torch.Tensor, torch.Tensor]]] = {}
    for one, norm in members:
        tall = one.matrix.tall()
        key = (one,) if one.matrix.stacked else (tall.shape[-1], tall.dtype == torch.float64)
        groups.setdefault(key, []).append((one, tall, norm))
    return [_Group(*map(list, zip(*group, strict=True))) for group in groups.values()]


class Spectrum:
    """``health/stable_rank/<layer>``, ``_min`` and ``_mean``.

    A layer with several matrices, or with a stack of experts, has the smallest of their ranks. Embeddings
    and output heads have a value but are no part of ``_min`` and ``_mean``. A matrix of zeros has none.

    Args:
        layers: what to read.
        model: the model, to tell convolutions from stacks of experts, and embeddings and heads, by what
            they are. Without it the latter are told by name, and a tensor of three dimensions is taken
            for a stack.
    """

    def __init__(self, layers: Layers, model: nn.Module | None = None) -> None:
        self._layers = layers
        self._matrices = [_Progress(matrix) for matrix in matrices(layers, model)]
        self._outside = outside_of_blocks(layers, model)
        self._calls = 0
        self._refused: dict[str, str] = {}
        labels = repr([unit.label for unit in layers.units])
        self._gate = Gate("spectrum", labels) if layers.together else None

    def leave(self) -> None:
        """This rank computes nothing any more; the others need not wait for it."""
        if self._gate is not None:
            self._gate.leave()

    @property
    def nbytes(self) -> int:
        """What is held between calls."""
        return sum(one.vector.nbytes for one in self._matrices if one.vector is not None)

    @torch.no_grad()
    def compute(self, norms: Mapping[int, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """1/stable rank and its residual, ``[units]``: this rank's share in the sum over ranks.

        Args:
            norms: ``WeightNorms.norms`` of these weights, if they are known already.

        Weights sharded by rows or columns take one all-reduce a step of the iteration, stacks of experts
        sharded by expert one in all; the same in the same order on every rank that holds them.
        """
        if self._gate is not None and not self._gate.passes():
            raise LayerError("some rank does not take part: stable ranks of sharded layers are not known")
        self._calls += 1
        self._refused = {}
        batches: dict[tuple[Shards, torch.device], list[_Progress]] = {}
        for one in self._matrices:
            shards = one.matrix.shards()
            if isinstance(shards, str):
                self._refused[one.matrix.unit.layer] = shards
            elif shards is not None:
                batches.setdefault((shards, one.matrix.local().device), []).append(one)
        values: dict[int, torch.Tensor] = {}
        residuals: dict[int, torch.Tensor] = {}
        for (shards, device), members in batches.items():
            with torch.autocast(device.type, enabled=False):  # which would round the products
                scales = norms_of([one.matrix for one in members], device, shards, norms or {})
                generator = torch.Generator(device)
                plans: dict[_Plan, list[int]] = {}
                for i, (one, norm) in enumerate(zip(members, scales, strict=True)):
                    plans.setdefault(one.plan(shards, norm, self._calls), []).append(i)
                found: dict[_Progress, Pair] = {}
                for plan, chosen in plans.items():
                    for a in range(0, len(chosen), IN_STEP):
                        some = [(members[i], scales[i]) for i in chosen[a : a + IN_STEP]]
                        found |= self._solve(plan, some, shards, generator)
            for one in members:
                one.compare()
            worst = shards.worst([found[one] for one in members])
            for one, (value, residual) in zip(members, worst, strict=True):
                share = 1 / one.matrix.holders if self._layers.together else 1.0
                values[one.matrix.index], residuals[one.matrix.index] = value * share, residual * share
        tensors = packed("spectrum/value", values, self._layers)
        return tensors | packed("spectrum/residual", residuals, self._layers)

    def _solve(
        self,
        plan: _Plan,
        members: list[tuple[_Progress, torch.Tensor]],
        shards: Shards,
        generator: torch.Generator,
    ) -> dict[_Progress, Pair]:
        """Largest eigenvalue and residual of each, relative to the squared norm."""
        if plan.alone:
            return {one: one.alone(plan, norm, generator, self._calls) for one, norm in members}
        groups = _grouped(members)
        for group in groups:
            group.begin(plan, generator, self._calls)
        look = not shards.summed and generator.device.type == "cpu"
        steps, done = plan.steps, 0
        while True:
            for _ in range(steps):
                summed = shards.sum([group.products() for group in groups])
                for group, own in zip(groups, summed, strict=True):
                    group.space.absorb(own)
            done += steps
            for group in groups:
                group.end()
            if not look or done >= MOST or all(group.settled() for group in groups):
                break
            steps = STILL if done < WARM else WARM
            if plan.search:  # its chain goes on from the random vector only, not from the leading one
                plan = plan._replace(search=False)
                for group in groups:
                    group.begin(plan, generator, self._calls)
        return {one: pair for group in groups for one, pair in group.found()}

    def decode(self, arrays: Mapping[str, Floats]) -> Values:
        """The layers' stable ranks. Where a residual is too large, the next call makes more steps."""
        values = unpacked("spectrum/value", arrays, self._layers)
        residuals = unpacked("spectrum/residual", arrays, self._layers)
        own = {one.matrix.index: one for one in self._matrices}
        for i, one in own.items():
            one.settled, one.value = bool(residuals[i] <= TOLERANCE * values[i]), float(values[i])
        ranks, missing = stable_ranks(
            self._layers, values, residuals, own=own, refused=self._refused, tolerance=TOLERANCE
        )
        inside = [rank for layer, rank in ranks.items() if layer not in self._outside]
        ends = {"min": np.min(inside), "mean": np.mean(inside)} if inside else {}
        scalars = {f"{NAME}_{end}": float(value) for end, value in ends.items()}
        unavailable = {f"{NAME}/{layer}": reason for layer, reason in missing.items()}
        return Values(scalars, {NAME: ranks} if ranks else {}, unavailable)
