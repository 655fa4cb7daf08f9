"""Every family against exact computations in double precision, whatever comes: shapes from 0-d to stacks and
convolutions, four dtypes, any strides, sparse gradients, elements of 1e-30, 1e30, zero, NaN and infinity.

Tolerances are those of docs/signals.md. Where a number is an estimate, five of its standard errors are
allowed, so that none of some thousand comparisons fails by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.signals.exact import exact_norm
from tests.signals.kinds import (
    DTYPES,
    KERNELS,
    LARGE,
    LAYOUTS,
    MATRICES,
    POWERS,
    SMALL,
    STACKS,
    Kind,
    Shape,
    block_names,
    close,
    doubles,
    examples,
    gaussian,
    in_block,
    kinds,
    low_rank,
    model_of,
    numbers,
    transposed,
)
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals.cosine import GradientCosine
from palingenesis.signals.drift import Drift
from palingenesis.signals.entropy import Entropy
from palingenesis.signals.gradients import GradientReader
from palingenesis.signals.losses import Losses
from palingenesis.signals.microbatch import MicroBatchNorms
from palingenesis.signals.noise_scale import Batch, NoiseScale
from palingenesis.signals.norms import gradient_norms
from palingenesis.signals.replicas import fingerprint
from palingenesis.signals.sketch import Sketcher
from palingenesis.signals.spectrum import Spectrum
from palingenesis.signals.tokens import Tokens
from palingenesis.signals.updates import Updates
from palingenesis.signals.values import Values
from palingenesis.signals.weights import WeightNorms

CPU = torch.device("cpu")
# Without infinities, whose differences are not numbers; and without either.
NO_INFINITY = [*POWERS, "zero", "nan"]
FINITE = [*POWERS, "zero"]


def test_tensors_are_of_the_kinds_they_are_meant_to_be() -> None:
    made = Kind((13, 17), torch.float32, "transposed", "tiny", "gaussian", 0).tensor()
    assert not made.is_contiguous() and 1e-31 < made.abs().mean() < 1e-29
    made = Kind((13, 17), torch.bfloat16, "every second", "huge", "rank one", 0).tensor()
    assert made.stride() == (34, 2) and 1e29 < made.abs().mean() < 1e31
    made = Kind((3, 11, 8), torch.float64, "offset", "plain", "low rank", 0).tensor()
    assert made.storage_offset() == 1 and torch.linalg.matrix_rank(made).tolist() == [3, 3, 3]
    assert Kind((6, 4, 3, 3), torch.float16, "contiguous", "nan", "few", 5).tensor().isnan().sum() == 1
    assert Kind((17, 1), torch.float16, "contiguous", "zero", "few", 5).tensor().count_nonzero() == 0


# -- gradients --------------------------------------------------------------------------------------------


@st.composite
def some_gradients(draw: st.DrawFn, shapes: Sequence[Shape], steps: int) -> list[list[tuple[Kind, str]]]:
    """For each parameter and step a kind, and how it comes: dense, sparse, expanded or not at all."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        first = draw(kinds(shapes))
        each = []
        for _ in range(steps):
            kind = draw(kinds([first.shape], dtypes=[first.dtype]))
            hows = ["dense", "dense", "none"] + (["sparse", "expanded"] if math.prod(kind.shape) > 1 else [])
            each.append((kind, draw(st.sampled_from(hows))))
        found.append(each)
    return found


def gradient_of(kind: Kind, how: str) -> torch.Tensor | None:
    values = kind.tensor()
    if how == "none":
        return None
    if how == "expanded":  # what sums of outputs leave
        return values[:1].expand_as(values)
    if how == "sparse":  # as of an embedding: some rows, one of them twice
        rows = torch.arange(0, values.shape[0], 2).repeat(2)
        return torch.sparse_coo_tensor(rows[None], values[rows] / 4, values.shape, check_invariants=True)
    return values


def parameters_of(given: list[list[tuple[Kind, str]]]) -> nn.Module:
    return model_of(*(torch.zeros(one[0][0].shape, dtype=one[0][0].dtype) for one in given))


def put(model: nn.Module, given: list[list[tuple[Kind, str]]], step: int) -> None:
    for parameter, each in zip(model.parameters(), given, strict=True):
        parameter.grad = gradient_of(*each[step])


def exact_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """In double precision before repeated rows are added."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=torch.float64)
    return gradient.double().to_dense()


@examples(120)
@given(some_gradients([*SMALL, *LARGE], 1))
def test_gradient_norms(given: list[list[tuple[Kind, str]]]) -> None:
    model = parameters_of(given)
    put(model, given, 0)
    layers = find_layers(model)
    reader = GradientReader(layers, guard=True)
    reader.look(1)
    check = reader.send(1, {})
    reading = reader.decode(check, check.packet.arrays())
    expected = [exact_norm(doubles([exact_gradient(unit.parameter)])) for unit in layers.units]
    for found, right, unit in zip(reading.norm.tolist(), expected, layers.units, strict=True):
        # Repeated rows are added in the gradient's own dtype, as the optimizer would have them.
        own = {torch.float16: 1e-2, torch.bfloat16: 1e-2}.get(unit.parameter.dtype, 1e-5)
        sparse = unit.parameter.grad is not None and unit.parameter.grad.is_sparse
        assert close(found, right, own if sparse else 1e-5), unit.name
        assert math.isnan(found) == math.isnan(right)
    absent = [unit.parameter.grad is None for unit in layers.units]
    assert reading.absent.tolist() == absent


@examples(100)
@given(some_gradients([*SMALL, *LARGE], 2))
def test_cosine(given: list[list[tuple[Kind, str]]]) -> None:
    model = parameters_of(given)
    layers = find_layers(model)
    cosine = GradientCosine(layers)
    seen = []
    for step in range(2):
        put(model, given, step)
        whole = [unit.parameter.grad for unit in layers.units]
        norms = {CPU: gradient_norms(whole, CPU)}
        seen.append({u.name: doubles([g]) for u, g in zip(layers.units, whole, strict=True) if g is not None})
        if step == 0:
            cosine.arm(1, norms)
    values = cosine.decode(numbers(cosine.compute(2, norms)))
    x, y = seen
    found = values.layers.get("health/grad_cosine", {}) | {"": values.scalars.get("health/grad_cosine_sim")}
    names = {block: [u.name for u in in_block(layers, block)] for block in block_names(layers)}
    names[""] = [unit.name for unit in layers.units]
    for block, members in names.items():
        both = [name for name in members if name in x and name in y]
        right = cosine_of(*(torch.cat([*(one[n] for n in both), torch.zeros(0).double()]) for one in seen))
        reason = values.unavailable.get(f"health/grad_cosine/{block}" if block else "health/grad_cosine_sim")
        changed = [name for name in members if (name in x) != (name in y)]
        sketched = sum(u.parameter.numel() for u in layers.units if u.name in members) > cosine.width
        value = found.get(block)
        if right is None:
            assert value is None
        elif math.isnan(right):
            assert value is None and reason is not None
        elif value is None:  # only where what one step lacks drowns the rest
            assert sketched and changed and reason is not None
        elif sketched and changed:
            assert abs(value - right) <= 5 * 0.01
        else:
            error = (1 - right**2) / math.sqrt(cosine.width) if sketched else 0.0
            assert abs(value - right) <= 5 * error + 1e-4, block


def cosine_of(x: torch.Tensor, y: torch.Tensor) -> float | None:
    if not (x.isfinite().all() and y.isfinite().all()):
        return math.nan
    if not (x.count_nonzero() and y.count_nonzero()):
        return None
    x, y = x / x.abs().max(), y / y.abs().max()
    return float(x @ y / (x.norm() * y.norm()))


@examples(60)
@given(some_gradients([*SMALL, (127, 131)], 3))
def test_micro_batches(given: list[list[tuple[Kind, str]]]) -> None:
    """Through autograd: the gradient of a sum of products with given tensors is these tensors."""
    model = parameters_of(given)
    parameters = list(model.parameters())
    layers = find_layers(model)
    hooks = MicroBatchNorms(layers)
    hooks.arm()
    squares, units, ran = [], np.zeros(len(parameters)), 0
    for step in range(3):
        terms, found = [], np.zeros(len(parameters))
        for i, (parameter, each) in enumerate(zip(parameters, given, strict=True)):
            kind, how = each[step]
            if how == "none":
                continue
            if how == "sparse":
                rows = torch.arange(0, kind.shape[0], 2)
                wanted = kind.tensor()[rows]
                # Autograd cannot add sparse gradients of half precision on a CPU.
                if parameter.dim() == 2 and kind.dtype in (torch.float32, torch.float64):
                    terms.append(_product(nn.functional.embedding(rows, parameter, sparse=True), wanted))
                else:
                    terms.append(_product(parameter[rows], wanted))
            else:
                wanted = kind.tensor()
                terms.append(_product(parameter, wanted))
            found[i] = exact_norm(wanted) ** 2 if wanted.numel() else 0.0
        if terms:
            torch.stack(terms).sum().backward()
            squares.append(found)
            units, ran = units + found, ran + 1
    # Who was in no micro-batch tells nothing; who begins the next is heard again.
    told = hooks.collect()
    everywhere = all(how != "none" for each in given for _, how in each)
    if not ran:
        assert told is None
        return
    assert told is not None
    for value, right in zip(told.units[CPU].tolist(), units.tolist(), strict=True):
        assert close(value, right, 2e-5)
    if everywhere:
        assert told.count == ran
        for value, row in zip(told.squares[CPU].tolist(), squares, strict=True):
            assert close(value, float(row.sum()), 2e-5)


def _product(parameter: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A number whose gradient is what is wanted, bit for bit, whatever the number itself is."""
    return (parameter * wanted).sum().float() * 1.0


# -- noise scale: numbers in ------------------------------------------------------------------------------

# Small whole numbers, so that fractions stay exact and every draw of a batch can be gone through.
POPULATIONS = st.integers(1, 3).flatmap(
    lambda dims: st.lists(st.lists(st.integers(-4, 4), min_size=dims, max_size=dims), min_size=2, max_size=3)
)


def squared(vector: Iterable[Fraction]) -> Fraction:
    return sum((x * x for x in vector), Fraction(0))


def mean_of(vectors: Sequence[Sequence[Any]]) -> list[Fraction]:
    return [Fraction(sum(column)) / len(vectors) for column in zip(*vectors, strict=True)]


def truth_of(population: list[list[int]]) -> tuple[float, float]:
    """|G|² and tr(Σ) of one example drawn from a finite population."""
    center = mean_of(population)
    spread = [squared(a - b for a, b in zip(one, center, strict=True)) for one in population]
    return float(squared(center)), float(sum(spread) / len(spread))


def told(scale: NoiseScale, source: str) -> np.ndarray:
    """``[steps, 2]``: estimates of |G|² and tr(Σ)."""
    return np.array([row[1:3] for row in scale.state_dict()[source]["seen"]])


@pytest.mark.parametrize("equal_shares", [False, True])
@examples(40)
@given(POPULATIONS, st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(lambda n: 2 <= sum(n) <= 5))
def test_noise_of_parts_over_every_draw_there_is(
    equal_shares: bool, population: list[list[int]], counts: list[int]
) -> None:
    """The mean over all equally likely batches is the truth, not only about it."""
    used = [n for n in counts if n]
    scale = NoiseScale(window=10**6)
    shares = [1 / len(counts)] * len(counts) if equal_shares else [n / sum(counts) for n in counts]
    exact_shares = [Fraction(1, len(counts)) if equal_shares else Fraction(n, sum(counts)) for n in counts]
    for step, drawn in enumerate(itertools.product(population, repeat=sum(counts))):
        left, added = list(drawn), []
        for n, share in zip(counts, exact_shares, strict=True):
            part, left = left[:n], left[n:]
            added.append([share * x for x in mean_of(part)] if n else [Fraction(0)] * len(population[0]))
        whole = [sum(column, Fraction(0)) for column in zip(*added, strict=True)]
        scale.add_parts(
            step,
            "microbatch",
            [float(squared(one)) for one in added],
            float(squared(whole)),
            tokens=counts,
            shares=shares if equal_shares else None,
        )
    found = told(scale, "microbatch")
    if len(used) < 2:
        assert not len(found)
        return
    assert len(found) == len(population) ** sum(counts)
    assert found.mean(0) == pytest.approx(truth_of(population), rel=1e-9, abs=1e-9)


@examples(40)
@given(POPULATIONS, st.integers(1, 2), st.integers(1, 3))
def test_noise_of_consecutive_steps_over_every_draw_there_is(
    population: list[list[int]], before: int, now: int
) -> None:
    scale = NoiseScale(window=10**6)
    for step, drawn in enumerate(itertools.product(population, repeat=before + now)):
        x, y = mean_of(drawn[:before]), mean_of(drawn[before:])
        inner = float(sum(a * b for a, b in zip(x, y, strict=True)))
        scale.add_consecutive(
            step, inner, float(squared(x)), float(squared(y)), Batch(tokens=before), Batch(tokens=now)
        )
    found = told(scale, "consecutive")
    assert found.mean(0) == pytest.approx(truth_of(population), rel=1e-9, abs=1e-9)


@examples(80)
@given(
    st.integers(8, 60),
    st.integers(2, 5),
    st.sampled_from([1e-60, 1e-9, 1.0, 1e60]),
    st.sampled_from([0.05, 1.0, 30.0]),
    st.booleans(),
    st.integers(0, 999),
)
def test_the_noise_scale_is_the_ratio_of_weighted_means(
    steps: int, parts: int, size: float, noisy: float, tokens: bool, seed: int
) -> None:
    """Squared norms of gradients of any size: the scale is a ratio and does not feel it."""
    random = np.random.default_rng(seed)
    scale, rows, items = NoiseScale(window=40, rate=0.07), [], []
    for step in range(steps):
        counts = random.integers(1, 9, parts).astype(float)
        gradients = 1.0 + noisy * random.standard_normal((parts, 50)) / np.sqrt(counts)[:, None]
        added = gradients * (counts / counts.sum())[:, None]
        whole = added.sum(0)
        scale.add_parts(
            step,
            "rank",
            np.square(added).sum(1) * size,
            float(whole @ whole) * size,
            tokens=counts if tokens else None,
            sequences=2 * counts,
        )
        own = counts if tokens else 2 * counts
        between = own @ np.square(gradients - whole).sum(1) / (parts - 1)  # analysis of variance
        rows.append((float(whole @ whole) - between / own.sum(), between))
        items.append(own.sum())
    signal, noise = np.array(rows[-40:]).T
    weights = 0.93 ** np.arange(len(signal))[::-1]
    values, _ = scale.values()
    ratio = float(weights @ noise / (weights @ signal))
    mean_items = float(weights @ items[-40:] / weights.sum())
    if "health/gns" in values.scalars:
        right = {"health/gns": ratio * (2 if tokens else 1), "health/gns_ratio": ratio / mean_items}
        right |= {"health/gns_tokens": ratio} if tokens else {}
        for name, value in right.items():
            assert values.scalars[name] == pytest.approx(value, rel=1e-6)
            assert values.scalars[f"{name}_se"] / values.scalars[name] == pytest.approx(
                values.scalars["health/gns_ratio_se"] / values.scalars["health/gns_ratio"]
            )
    else:
        assert noisy > 1  # what is clear is told
        lower = values.scalars.get("health/gns_lower")
        assert lower is not None or "not even a lower bound" in values.unavailable["health/gns"]


# -- sketches ---------------------------------------------------------------------------------------------


@examples(60)
@given(
    kinds([s for s in SMALL if math.prod(s) <= 250], sizes=[*POWERS, "zero"]), st.sampled_from([2, 13, 101])
)
def test_a_sketch_is_a_product_with_a_matrix_of_signs(kind: Kind, width: int) -> None:
    """The matrix is found by sketching unit vectors, and has one sign in every column."""
    values = kind.tensor()
    count = values.numel()
    sketcher = Sketcher({"w": count}, width, CPU)
    scratch = sketcher.scratch()

    def of(tensor: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(width)
        sketcher.add("w", tensor, found, scratch)
        return found.double()

    columns = [of(unit.view(kind.shape)) for unit in torch.eye(count)]
    for column in columns:
        assert column.abs().sum() == 1 == column.abs().max()
    signs = torch.stack(columns, 1) if columns else torch.zeros(width, 0, dtype=torch.float64)
    flat = doubles([values])
    allowed = 1e-6 * (signs.abs() @ flat.abs())
    assert ((of(values) - signs @ flat).abs() <= allowed).all()
    if values.dim():
        assert ((of(values.to_sparse(1)) - signs @ flat).abs() <= allowed).all()


@examples(12)
@given(kinds(LARGE, sizes=list(POWERS)))
def test_squared_norms_of_sketches(kind: Kind) -> None:
    """Over 24 labels: the mean is the truth within five of the errors that independent signs would have."""
    values, width = kind.tensor(), 1021
    flat = doubles([values])
    flat = flat / flat.abs().max()
    found = []
    for label in range(24):
        sketcher, sketch = Sketcher({f"{label}": values.numel()}, width, CPU), torch.zeros(width)
        sketcher.add(f"{label}", values, sketch, sketcher.scratch())
        found.append(exact_norm(sketch) / exact_norm(values))
    column = torch.arange(len(flat)) % width
    energy = torch.zeros(width, dtype=torch.float64).index_add_(0, column, flat.square())
    fourth = torch.zeros(width, dtype=torch.float64).index_add_(0, column, flat**4)
    error = float((2 * (energy.square() - fourth).clamp(min=0)).sum().sqrt() / energy.sum())
    assert np.mean(np.square(found)) == pytest.approx(1, abs=5 * error / math.sqrt(24) + 1e-5)


# -- stable ranks -----------------------------------------------------------------------------------------


def exact_rank(weight: torch.Tensor) -> float | None:
    """‖W‖²/σ² from a full decomposition; ``None`` of zeros."""
    if not weight.isfinite().all():
        return math.nan
    wide = weight.double()
    if not wide.count_nonzero():
        return None
    values = torch.linalg.svdvals(wide / wide.abs().max())
    return float(values.square().sum() / values[0].square())


def settled(family: Spectrum) -> Values:
    """A number may be withheld while it is not known well enough; it has to come within four looks."""
    for _ in range(4):
        values = family.decode(numbers(family.compute()))
        if not any("so far" in reason for reason in values.unavailable.values()):
            break
    return values


def assert_rank(values: Values, layer: str, right: float | None) -> None:
    found = values.layers.get("health/stable_rank", {}).get(layer)
    if right is None:
        assert found is None and values.unavailable[f"health/stable_rank/{layer}"] == "every element is zero"
    else:
        assert found is not None and close(found, right, 0.01)


@examples(150)
@given(kinds([*MATRICES, *STACKS, *KERNELS]), st.booleans())
def test_stable_ranks(kind: Kind, kernel: bool) -> None:
    weight = kind.tensor()
    kernel = weight.dim() > 2 and kernel
    model = model_of(weight, kernel=kernel)
    values = settled(Spectrum(find_layers(model), model))
    stack = weight.dim() == 3 and not kernel
    if min(weight.shape[1:] if stack else weight.flatten(1).shape) < 8:
        assert values == Values()
        return
    ranks = [exact_rank(one) for one in (weight if stack else [weight.flatten(1)])]
    known = [rank for rank in ranks if rank is not None]
    right = float(np.min(known)) if known else None  # of experts the smallest; NaN where one is
    assert_rank(values, "layers.0.a", right)
    if right is not None:
        ends = [values.scalars[f"health/stable_rank_{end}"] for end in ("min", "mean")]
        assert ends == pytest.approx([values.layers["health/stable_rank"]["layers.0.a"]] * 2, nan_ok=True)


@examples(60)
@given(
    kinds([(131, 127), (200, 150), (8, 2111), (2111, 8), (3, 129, 40)], sizes=FINITE),
    st.sampled_from([0.0, 0.01, 0.05]),
)
def test_stable_ranks_of_weights_that_move_on(kind: Kind, change: float) -> None:
    """Looks that start from where the last one ended, at weights that moved by a part of their norm."""
    model = model_of(kind.tensor())
    family = Spectrum(find_layers(model), model)
    (weight,) = model.parameters()
    for look in range(4):
        values = settled(family)
        ranks = [exact_rank(one) for one in (weight.detach() if weight.dim() == 3 else [weight.detach()])]
        known = [rank for rank in ranks if rank is not None]
        assert_rank(values, "layers.0.a", float(np.min(known)) if known else None)
        noise = gaussian(kind.shape, torch.Generator().manual_seed(look))
        size = exact_norm(weight) / math.sqrt(weight.numel())
        with torch.no_grad():
            weight.copy_(weight.double() + change * size * noise)


@examples(30)
@given(kinds(SMALL))
def test_what_is_no_matrix_has_no_stable_rank(kind: Kind) -> None:
    model = model_of(kind.tensor(), kernel=False)
    values = settled(Spectrum(find_layers(model), model))
    sides = (
        kind.shape[1:] if len(kind.shape) == 3 else (kind.shape[:1] or (0,)) + (math.prod(kind.shape[1:]),)
    )
    if min(sides) < 8 or not math.prod(kind.shape):
        assert values == Values()


class CausalSelfAttention(nn.Module):
    """Query, key and value one after the other, as in nanoGPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)


class GPTNeoXAttention(nn.Module):
    """The three interleaved head by head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_attention_heads = 4
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)


def fused(how: str, weight: torch.Tensor) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with a fused projection ``[3d, d]``, and its parts by layer."""
    width = weight.shape[1]
    attention: Any
    if how == "per head":
        attention, name, owner = GPTNeoXAttention(width), "query_key_value", "query_key_value"
        parts = [weight.reshape(4, 3, width // 4, width)[:, i].reshape(width, width) for i in range(3)]
    elif how == "in turn":
        attention, name, owner = CausalSelfAttention(width), "c_attn", "c_attn"
        parts = list(weight.split(width))
    else:
        attention, name, owner = nn.MultiheadAttention(width, 4, bias=False), "", "in_proj"
        parts = list(weight.split(width))
    parameter = nn.Parameter(weight)
    if name:
        getattr(attention, name).weight = parameter
    else:
        attention.in_proj_weight = parameter
    model = nn.Module()
    model.attn = attention
    return model, {f"attn.{owner}[{part}]": one for part, one in zip("qkv", parts, strict=True)}


@examples(60)
@given(
    kinds([(24, 8), (36, 12), (60, 20)], sizes=NO_INFINITY),
    st.sampled_from(["per head", "in turn", "multihead"]),
)
def test_parts_of_fused_projections(kind: Kind, how: str) -> None:
    """Ranks, norms, drift and gradients, part by part."""
    weight = kind.tensor()
    model, parts = fused(how, weight)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 if parameter.shape == weight.shape else None
    layers = find_layers(model)
    drift, weights = Drift(layers), WeightNorms(layers)
    drift.begin()
    values = settled(Spectrum(layers, model))
    weights.compute()
    norms = {unit.layer: float(weights.norms[i]) for i, unit in enumerate(layers.units)}
    reader = GradientReader(layers, guard=False)
    reader.look(1)
    check = reader.send(1, {})
    gradients = dict(zip(layers.names, reader.decode(check, check.packet.arrays()).norm, strict=True))
    with torch.no_grad():
        next(unit.parameter for unit in layers.units if unit.layer in parts).neg_()
    moved = drift.decode(numbers(drift.compute()))
    for layer, part in parts.items():
        assert_rank(values, layer, exact_rank(part))
        assert close(norms[layer], exact_norm(part), 1e-5)
        assert close(gradients[layer], exact_norm(part * 0.5), 1e-5)
        if exact_norm(part):
            assert close(
                moved.layers["health/weight_drift"][layer], 2.0 if part.isfinite().all() else math.nan, 1e-5
            )
        else:
            assert f"health/weight_drift/{layer}" in moved.unavailable


# -- sizes of weights and how they move -------------------------------------------------------------------


@examples(80)
@given(
    st.lists(kinds([*SMALL, (0,), (127, 131)]), min_size=1, max_size=3),
    st.integers(2, 3),
    st.floats(1e-3, 1e3),
)
def test_weight_norms(members: list[Kind], blocks: int, factor: float) -> None:
    """Blocks of the same shapes, of which each is larger than the last by a factor."""
    weights = [kind.tensor() * factor**i for i in range(blocks) for kind in members]
    model = model_of(*weights, in_blocks_of=len(members))
    layers = find_layers(model)
    family = WeightNorms(layers)
    gradients = np.arange(1.0, len(layers.names) + 1)
    values = family.decode(numbers(family.compute()), of_gradients=gradients)
    ratios = []
    for name in "abc"[: len(members)]:
        alike = [u.parameter for u in layers.units if u.name.endswith(f".{name}.weight")]
        sizes = [exact_norm(one) for one in alike]
        if alike[0].dim() >= 2 and alike[0].numel() and max(sizes) != 0:
            ratios.append(max(sizes) / min(sizes) if min(sizes) else math.inf)
    for at, block in enumerate(block_names(layers)):
        own = [unit.parameter for unit in in_block(layers, block)]
        norm, count = exact_norm(doubles(own)), sum(one.numel() for one in own)
        found = values.layers.get("health/weight_norm", {}).get(block)
        if not count:
            assert found is None
            continue
        assert found is not None and close(found, norm / math.sqrt(count), 2e-5)
        gradient = math.hypot(*gradients[at * len(members) : (at + 1) * len(members)])
        if norm:
            expected = gradient / norm if math.isfinite(norm) else norm
            assert close(values.layers["health/gw_ratio"][block], expected, 2e-5) or norm == math.inf
        else:
            assert f"health/gw_ratio/{block}" in values.unavailable
    ratio = values.scalars.get("health/weight_norm_ratio")
    if not ratios:
        assert ratio is None
    else:
        worst = math.nan if any(map(math.isnan, ratios)) else max(ratios)
        assert ratio is not None and close(ratio, worst, 5e-5)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda w: w,
    "negated": lambda w: -w,
    "scaled": lambda w: w * 1.25,
    "noise": lambda w: w + 0.3 * w.abs().mean() * gaussian(tuple(w.shape), torch.Generator().manual_seed(5)),
    "replaced": lambda w: w.abs().mean() * gaussian(tuple(w.shape), torch.Generator().manual_seed(6)),
    "rank one": lambda w: w + w.abs().mean() * low_rank(tuple(w.shape), torch.Generator().manual_seed(7), 1),
    "zeroed": torch.zeros_like,
}


def changed(model: nn.Module, change: str) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(CHANGES[change](parameter.double()))


def moved_by(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float | None:
    """‖W − W0‖/‖W0‖; ``None`` where W0 is zero."""
    start = exact_norm(doubles(before))
    if not start:
        return None
    change = exact_norm(doubles(after) - doubles(before))
    return change / start if math.isfinite(start) and math.isfinite(change) else math.nan


@pytest.mark.parametrize("mode", ["sketch", "exact"])
@examples(80)
@given(
    st.lists(kinds([*SMALL, *LARGE], sizes=NO_INFINITY), min_size=1, max_size=3),
    st.sampled_from(list(CHANGES)),
    st.sampled_from(list(CHANGES)),
)
def test_drift(mode: Any, members: list[Kind], first: str, then: str) -> None:
    """Two changes, with the state saved and loaded in between."""
    model = model_of(*(kind.tensor() for kind in members))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    layers = find_layers(model)
    drift = Drift(layers, mode)
    drift.begin()
    for change in (first, then):
        changed(model, change)
        values = drift.decode(numbers(drift.compute()))
        for unit, start in zip(layers.units, before, strict=True):
            right = moved_by([start], [unit.parameter])
            found = values.layers.get("health/weight_drift", {}).get(unit.layer)
            if right is None:
                assert found is None and f"health/weight_drift/{unit.layer}" in values.unavailable
                continue
            sketched = mode == "sketch" and start.numel() > drift.width
            allowed = 5 * drift.relative_error if sketched else 1e-5
            assert found is not None and close(found, right, allowed, 1e-6), unit.name
            if torch.equal(start, unit.parameter):  # no NaN either
                assert found == 0
        again = Drift(layers, mode)
        again.load_state_dict(drift.state_dict())
        again.begin()
        drift = again


@examples(80)
@given(
    st.lists(kinds([*SMALL, *LARGE], sizes=FINITE), min_size=1, max_size=3),
    st.sampled_from([1e-3, 0.1, 1.0]),
    st.sampled_from(["dense", "sparse"]),
    st.integers(0, 999),
)
def test_updates(members: list[Kind], rate: float, how: str, seed: int) -> None:
    """A step of plain gradient descent by about ``rate`` of the weights, against copies."""
    model = model_of(*(kind.tensor() for kind in members))
    layers = find_layers(model)
    for i, unit in enumerate(layers.units):
        weight = unit.parameter
        source = torch.Generator().manual_seed(seed + i)
        gradient = gaussian(tuple(weight.shape), source) * float(weight.detach().double().abs().mean())
        gradient = gradient.to(weight.dtype)
        # The optimizer refuses to add sparse gradients to weights of other strides.
        if how == "sparse" and weight.dim() == 2 and weight.numel() and weight.is_contiguous():
            rows = torch.arange(0, weight.shape[0], 2)
            stored = gradient[rows]
            gradient = torch.sparse_coo_tensor(rows[None], stored, weight.shape, check_invariants=True)
        weight.grad = gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    updates = Updates(layers, [optimizer])
    before = {unit.name: unit.parameter.detach().clone() for unit in layers.units}
    updates.arm(3)
    optimizer.step()
    values = updates.decode(numbers(updates.compute(4)))

    for block in block_names(layers):
        own = in_block(layers, block)
        right = moved_by([before[u.name] for u in own], [u.parameter.detach() for u in own])
        found = values.layers.get("health/update_ratio", {}).get(block)
        if right is None:
            assert found is None
        elif found is None:
            assert "rounding" in values.unavailable[f"health/update_ratio/{block}"] and right < 1e-4
        else:
            sketched = any(u.parameter.numel() > updates.width for u in own)
            allowed = 5 / math.sqrt(2 * updates.width) + 0.06 if sketched else 1e-3
            assert close(found, right, allowed, 1e-6), block

    touched = lost = variance = slack = 0.0
    for unit in layers.units:
        has = exact_gradient(unit.parameter) != 0
        same = has & (unit.parameter.detach() == before[unit.name])
        count, size = has.numel(), min(has.numel(), updates._sample)
        touched, lost = touched + float(has.sum()), lost + float(same.sum())
        if size < count:
            for share in (float(has.double().mean()), float(same.double().mean())):
                variance += count**2 * share * (1 - share) / size
            slack += 10 * count / size  # a share so small that no sample shows it
    if not touched:
        assert "health/update_lost_pct" not in values.scalars
    elif "health/update_lost_pct" in values.scalars:
        allowed = 100 * (5 * math.sqrt(variance) + slack) / touched
        assert abs(values.scalars["health/update_lost_pct"] - 100 * lost / touched) <= allowed + 1e-9


# -- low-rank adapters ------------------------------------------------------------------------------------


@st.composite
def adapted_layers(draw: st.DrawFn) -> nn.Module:
    """One layer of a kind that PEFT adapts, of any size."""
    torch.manual_seed(draw(st.integers(0, 99)))
    m, n = draw(st.sampled_from([(1, 1), (1, 7), (7, 1), (3, 5), (13, 17), (31, 8), (8, 61)]))
    kind = draw(st.sampled_from(["linear", "embedding", "conv1d", "conv2d"]))
    layer: nn.Module
    if kind == "linear":
        layer = nn.Linear(n, m, bias=False)
    elif kind == "embedding":
        layer = nn.Embedding(n, m)
    else:
        layer = (nn.Conv1d if kind == "conv1d" else nn.Conv2d)(n, m, 3)
    if draw(st.booleans()):
        layer.weight.data = transposed(layer.weight.data)
    return layer.to(draw(st.sampled_from(DTYPES)))


@examples(60)
@given(
    adapted_layers(),
    st.sampled_from([1, 2, 5]),
    st.sampled_from(["plain", "tiny", "huge", "zero", "nan", "inf"]),
    st.sampled_from(["plain", "tiny", "huge"]),
    st.sampled_from(["gaussian", "constant", "few"]),
)
def test_adapters(given: nn.Module, rank: int, size: str, of_other: str, form: str) -> None:
    from peft import LoraConfig, get_peft_model

    from palingenesis.signals.lora import DRIFT, PRODUCT, RANK, Adapters

    layer = given
    model: Any = get_peft_model(nn.Sequential(layer), LoraConfig(r=rank, lora_alpha=3, target_modules=["0"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                own = size if "lora_B" in name or "embedding_B" in name else of_other
                made = Kind(tuple(parameter.shape), parameter.dtype, "contiguous", own, form, rank)
                parameter.copy_(made.tensor())
    module = model.base_model.model[0]
    found = Adapters(model)
    for _ in range(4):
        values = found.decode(numbers(found.compute()))
        if not any("so far" in reason for reason in values.unavailable.values()):
            break
    base = module.base_layer.weight.detach().double().flatten(1)
    change = module.double().get_delta_weight("default").detach().flatten(1)
    (name,) = [name for name, one in model.named_modules() if one is module]
    told = {signal: values.layers.get(signal, {}).get(name) for signal in (DRIFT, PRODUCT, RANK)}
    if not change.isfinite().all():
        assert all(value is None or not math.isfinite(value) for value in told.values())
        return
    # What the factors would come to if they pointed the same way: the size of their product's terms.
    terms = math.prod(exact_norm(p) for name, p in module.named_parameters() if "lora_" in name) * 3 / rank
    moved, start = exact_norm(change), exact_norm(base)
    assert told[DRIFT] is not None and close(told[DRIFT], moved / start, 1e-4, 1e-6 * terms / start)
    if exact_rank(change) is None:
        assert told[PRODUCT] is None
    elif moved > 0.01 * terms:
        assert told[PRODUCT] is not None and close(told[PRODUCT], exact_rank(change) or 0, 1e-4)
    right = exact_rank(base + change)
    assert right is not None
    if told[RANK] is None:
        assert "cancel" in values.unavailable[f"{RANK}/{name}"]
        assert exact_norm(base + change) < 1e-3 * (start + terms)
    else:
        assert close(told[RANK], right, 0.01)


# -- outputs, tokens and losses ---------------------------------------------------------------------------


def entropy_of(row: Iterable[float]) -> float:
    """−Σ p log p of one row of logits, with exact sums."""
    z = list(row)
    largest = max(z)
    if any(map(math.isnan, z)) or math.isinf(largest):
        return math.nan
    weights = [math.exp(max(x - largest, -800.0)) for x in z]
    total = math.fsum(weights)
    return (
        math.log(total)
        - math.fsum(w * max(x - largest, -800.0) for w, x in zip(weights, z, strict=True)) / total
    )


@examples(100)
@given(
    st.sampled_from([(), (1,), (5,), (0,), (1, 1), (3, 7), (7, 1), (2, 0), (2, 3, 5)]),
    st.sampled_from([1, 2, 17]),
    st.sampled_from(DTYPES),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(["plain", "tiny", "huge", "mixed", "uneven", "zero", "nan", "inf", "-inf"]),
    st.booleans(),
    st.integers(0, 999),
)
def test_entropy(
    positions: Shape, size: int, dtype: torch.dtype, layout: str, of: str, shifted: bool, seed: int
) -> None:
    logits = Kind((*positions, size), dtype, layout, of, "gaussian", seed).tensor()
    random = torch.Generator().manual_seed(seed)
    labels = torch.where(torch.rand(positions, generator=random) < 0.3, -100, 1)
    labels = LAYOUTS[layout](labels) if layout != "offset" else labels
    entropy = Entropy(positions=64)
    entropy.observe_output(logits=logits, labels=labels, shifted=shifted)
    values = entropy.decode(numbers(entropy.compute()))
    if not positions and not shifted:
        assert not values.scalars and "do not fit" in values.unavailable["health/output_entropy"]
        return
    if shifted:
        bears = labels.reshape(-1) != -100
    else:
        last = torch.zeros_like(labels[..., :1], dtype=torch.bool)  # predicts nothing
        bears = torch.cat([labels[..., 1:] != -100, last], -1).reshape(-1)
    rows = logits.double().reshape(-1, size)[bears]
    if not len(rows):
        assert not values.scalars
        return
    every = [entropy_of(row) for row in rows.tolist()]
    found = values.scalars["health/output_entropy"]
    assert math.isnan(found) == any(map(math.isnan, every))
    assert math.isnan(found) or found == pytest.approx(np.mean(every), rel=1e-5, abs=1e-6)
    assert math.isnan(found) or values.scalars["health/output_entropy_se"] == 0


@examples(60)
@given(
    st.sampled_from([(5,), (3, 7), (7, 1), (2, 3, 5)]),
    st.sampled_from([(1, 1), (2, 3), (17, 8)]),
    st.sampled_from(DTYPES),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from([(1.0, None), (0.5, None), (2.0, 3.0)]),
    st.integers(0, 999),
)
def test_entropy_of_hidden_states_and_a_head(
    positions: Shape,
    head: tuple[int, int],
    dtype: torch.dtype,
    layout: str,
    then: tuple[float, float | None],
    seed: int,
) -> None:
    """Transposed heads, as of tied weights, and hidden states of any strides."""
    vocabulary, width = head
    weight = Kind((vocabulary, width), dtype, layout, "plain", "gaussian", seed).tensor()
    hidden = Kind((*positions, width), dtype, layout, "plain", "gaussian", seed + 7).tensor()
    scale, cap = then
    entropy = Entropy(positions=1000)
    labels = torch.ones(positions, dtype=torch.long)
    entropy.observe_output(labels=labels, hidden=hidden, head=weight, scale=scale, soft_cap=cap, shifted=True)
    found = entropy.decode(numbers(entropy.compute())).scalars["health/output_entropy"]
    # The head's own product rounds to its dtype.
    logits = nn.functional.linear(hidden.reshape(-1, width), weight).double() * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    half = dtype in (torch.float16, torch.bfloat16)
    expected = np.mean([entropy_of(row) for row in logits.tolist()])
    assert found == pytest.approx(expected, rel=1e-2 if half else 1e-5, abs=1e-5)


@examples(100)
@given(
    st.lists(
        st.sampled_from([(), (1,), (6,), (0,), (1, 1), (3, 7), (7, 1), (2, 0), (0, 4), (2, 3, 5)]),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["contiguous", "transposed", "every second"]),
    st.sampled_from([torch.int64, torch.int32]),
    st.sampled_from([torch.bool, torch.int64, torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 999),
)
def test_tokens(
    shapes: list[Shape],
    layout: str,
    of_labels: torch.dtype,
    of_mask: torch.dtype,
    shifted: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    tokens = Tokens()
    bearing = every = hidden = masked = 0
    for shape in shapes:
        labels = LAYOUTS[layout](torch.randint(-1, 3, shape, generator=random).to(of_labels).mul(100))
        mask = LAYOUTS[layout](torch.randint(0, 2, shape, generator=random).to(of_mask))
        tokens.batch(labels, mask, shifted=shifted)
        rows = labels.reshape(-1, shape[-1]) if shape and math.prod(shape) else labels.reshape(1, -1)
        for row in rows.tolist():
            bearing += sum(label != -100 for label in row[0 if shifted or not shape else 1 :])
        every += math.prod(shape)
        if len(shape) == 2:
            masked += math.prod(shape)
            hidden += sum(float(x) == 0 for x in mask.flatten().tolist())
    assert tokens.step_tokens is not None and int(tokens.step_tokens) == bearing
    values = tokens.decode(numbers(tokens.compute()))
    expected = {}
    if every:
        expected["health/token_efficiency"] = bearing / every
    if masked:
        expected["health/padding_pct"] = 100 * hidden / masked
    assert values.scalars == pytest.approx(expected)


@examples(60)
@given(st.lists(kinds([()]), min_size=1, max_size=12))
def test_losses(losses: list[Kind]) -> None:
    """Tensors of any dtype, as training loops have them."""
    given = [kind.tensor() for kind in losses]
    window = Losses()
    for loss in given:
        window.note(float(loss))
    kept = [Fraction(float(loss)) for loss in given if loss.isfinite()]
    found = window.values().scalars
    if not kept:
        assert found == {}
        return
    mean = sum(kept) / len(kept)
    largest = float(max(map(abs, kept)))
    assert found["health/loss_mean"] == pytest.approx(float(mean), rel=1e-12, abs=1e-14 * largest)
    if len(kept) > 1:
        variance = sum((loss - mean) ** 2 for loss in kept) / (len(kept) - 1)
        assert found["health/loss_std"] == pytest.approx(math.sqrt(variance), rel=1e-9, abs=1e-14 * largest)


# -- replicas ---------------------------------------------------------------------------------------------


@examples(150)
@given(kinds([*SMALL, *LARGE]), st.sampled_from(list(LAYOUTS)), st.integers(0, 2**20))
def test_fingerprints(kind: Kind, layout: str, bit: int) -> None:
    """Equal bits in any layout have one fingerprint; one bit less and it is another."""
    tensor = kind.tensor()
    found = int(fingerprint(tensor))
    assert int(fingerprint(LAYOUTS[layout](tensor.clone()))) == found
    if not tensor.numel():
        assert found == 0
        return
    flipped = tensor.clone(memory_format=torch.contiguous_format)
    data = flipped.view(-1).view(torch.uint8)
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    assert int(fingerprint(flipped)) != found
    assert int(fingerprint(LAYOUTS[layout](flipped))) == int(fingerprint(flipped))
