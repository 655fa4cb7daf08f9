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
turns out too large, the number is withheld and the next call goes on.
"""

from __future__ import annotations

import math
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
from palingenesis.signals.gate import Gate
from palingenesis.signals.krylov import Krylov
from palingenesis.signals.values import Values
from palingenesis.signals.vectors import gram
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
KEPT_FROM = 1 << 7  # longer side from which on a vector of the shorter one is worth keeping
IN_STEP = 32  # matrices, which share an all-reduce where sharded: bounds the memory of their spaces

_SEED = 0x5EED


class _Plan(NamedTuple):
    """Whether to start from the last call's vector, from how many random ones, and for how many steps."""

    known: bool
    fresh: int
    steps: int
    search: bool = False


@dataclass(eq=False)
class _Progress:
    """How far the iteration for one matrix, or one stack, has come."""

    matrix: Matrix
    vector: torch.Tensor | None = None
    settled: bool = False
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
        if self.vector is None or self.vector.shape != (*shape[:-2], shape[-1]):
            return _Plan(known=False, fresh=2, steps=WARM if look else COLD)
        if shards.summed or (call + self.matrix.index) % SEARCH_EVERY == 0:
            return _Plan(known=True, fresh=1, steps=SEARCH, search=look)
        if look and self.settled and is_still(self.value, before, self.square):
            return _Plan(known=True, fresh=0, steps=STILL)
        return _Plan(known=True, fresh=1, steps=WARM if look or self.settled else COLD)

    def start(self, plan: _Plan, like: torch.Tensor, generator: torch.Generator, call: int) -> torch.Tensor:
        """Where to begin for a tall matrix: ``[..., b, d]``, the same on every rank."""
        generator.manual_seed(zlib.crc32(f"{_SEED} {call} {self.matrix.unit.label}".encode()))
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        shape = (*like.shape[:-2], plan.fresh, like.shape[-1])
        block = torch.randn(shape, generator=generator, dtype=dtype, device=like.device)
        if self.vector is None or not plan.known:
            return block
        known = self.vector.to(dtype, copy=True).to(like.device).nan_to_num_(0.0)  # a NaN is not to stay
        return torch.cat([known.unsqueeze(-2), block], dim=-2)


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
        self._value, self._residual, vectors = self.space.ritz()
        lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        vectors = (vectors / lengths).to(torch.bfloat16)  # as a start that will do
        # Of a stack one tensor, of others each its own: a view would keep all of them alive.
        each = [vectors] if self._members[0].matrix.stacked else [one.clone() for one in vectors.unbind(0)]
        for one, kept, matrix in zip(self._members, each, self._tall, strict=True):
            one.vector = kept if max(matrix.shape[-2:]) >= KEPT_FROM else None

    def unsettled(self) -> _Group | None:
        """Those whose residual is too large, to go on with; reads the device. A NaN will not get better."""
        worse = self._residual > AIM * self._value
        if self._members[0].matrix.stacked or bool(worse.all()):
            return self if bool(worse.any()) else None
        chosen = worse.nonzero().flatten().tolist()
        if not chosen:
            return None
        rest = _Group(
            [self._members[i] for i in chosen],
            [self._tall[i] for i in chosen],
            [self._norms[i] for i in chosen],
        )
        rest._scale, rest.space = self._scale[chosen], self.space.of(chosen)
        return rest

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
        groups = _grouped(members)
        for group in groups:
            group.begin(plan, generator, self._calls)
        look = not shards.summed and generator.device.type == "cpu"
        steps, done = plan.steps, 0
        found: dict[_Progress, Pair] = {}
        while groups and done < MOST:
            for _ in range(steps):
                products = shards.sum([group.products() for group in groups])
                for group, product in zip(groups, products, strict=True):
                    group.space.absorb(product)
            done += steps
            for group in groups:
                group.end()
                found |= group.found()
            if not look:
                break
            groups = [rest for group in groups if (rest := group.unsettled()) is not None]
            steps = STILL if done < WARM else WARM
            if plan.search:  # its chain goes on from the random vector only, not from the leading one
                plan = plan._replace(search=False)
                for group in groups:
                    group.begin(plan, generator, self._calls)
        return found

    def decode(self, arrays: Mapping[str, Floats]) -> Values:
        """The layers' stable ranks. Where a residual is too large, the next call makes more steps."""
        values = unpacked("spectrum/value", arrays, self._layers)
        residuals = unpacked("spectrum/residual", arrays, self._layers)
        ranks: dict[str, float] = {}
        missing = dict(self._refused)
        zero: set[str] = set()
        own = {one.matrix.index: one for one in self._matrices}
        for i, unit in enumerate(self._layers.units):
            value, residual, one = float(values[i]), float(residuals[i]), own.get(i)
            if one is None and value == 0:
                continue  # no matrix
            settled = residual <= TOLERANCE * value
            if one is not None:
                one.settled, one.value = settled, value
            if not math.isfinite(value):
                ranks[unit.layer] = math.nan
            elif value == 0:
                zero.add(unit.layer)
            elif settled:
                ranks[unit.layer] = float(np.minimum(ranks.get(unit.layer, math.inf), 1 / value))
            else:
                missing[unit.layer] = (
                    f"σ is known to {50 * residual / value:.1f}% so far: more at the next call"
                )
        # Of a layer's matrices, one that is not known may be the smallest; one of zeros has no rank.
        ranks = {layer: rank for layer, rank in ranks.items() if layer not in missing}
        missing = {layer: "every element is zero" for layer in zero if layer not in ranks} | missing
        inside = [rank for layer, rank in ranks.items() if layer not in self._outside]
        ends = (
            {f"{NAME}_min": float(np.min(inside)), f"{NAME}_mean": float(np.mean(inside))} if inside else {}
        )
        unavailable = {f"{NAME}/{layer}": reason for layer, reason in missing.items()}
        return Values(ends, {NAME: ranks} if ranks else {}, unavailable)
