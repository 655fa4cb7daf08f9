"""The noise scale against its known value on Gaussian linear regression."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from palingenesis.signals.noise_scale import SOURCES, Batch, NoiseScale, _t95, ratio_estimate

TRIALS = 200
STEPS = 24

# Loss (y − x·w)²/2 with x ~ N(0, I) in d dimensions, y = x·w* + σ·noise, |w − w*| = 1. The gradient of one
# example is x(x·δ − σ·noise), so |G|² = 1, tr(Σ) = d + 1 + d·σ², and B = tr(Σ)/|G|² is known.
# Name: dimensions, B over the batch, counts of the parts.
PROBLEMS = {
    "B/batch 0.01": (3, 0.01, [100, 100, 100, 100]),
    "B/batch 0.01, unequal": (3, 0.01, [25, 75, 125, 175]),
    "B/batch 1": (15, 1.0, [8, 8, 8, 8]),
    "B/batch 1, unequal": (15, 1.0, [2, 5, 9, 16]),
    "B/batch 10": (40, 10.0, [4, 4]),
    "B/batch 10, unequal": (40, 10.0, [1, 2, 5]),
    "B/batch 100": (40, 100.0, [2, 2, 2, 2]),
    "B/batch 100, unequal": (40, 100.0, [1, 1, 2, 4]),
}


def gradients(rng: np.random.Generator, dims: int, scale: float, counts: list[int]) -> np.ndarray:
    """Mean gradients of the parts of one step: ``[trials, parts, dims]``."""
    sigma = math.sqrt(max(scale * sum(counts) - dims - 1, 0.0) / dims)
    found = np.empty((TRIALS, len(counts), dims))
    for part, count in enumerate(counts):
        x = rng.standard_normal((TRIALS, count, dims), dtype=np.float32)
        error = x[..., 0] - sigma * rng.standard_normal((TRIALS, count), dtype=np.float32)
        found[:, part] = np.einsum("tnd,tn->td", x, error) / count
    return found


def truth(dims: int, scale: float, counts: list[int]) -> float:
    return max(scale * sum(counts), dims + 1.0)


def covered(scale: NoiseScale, right: float) -> bool:
    """Whether what was told about the noise scale is so."""
    values, _ = scale.values()
    found = values.scalars
    if "health/gns" in found:
        return abs(found["health/gns"] - right) <= 1.96 * found["health/gns_se"]
    return found.get("health/gns_lower", 0.0) <= right


@pytest.mark.parametrize("source", ["microbatch", "rank"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_interval_covers_the_truth_parts(problem: str, source: str) -> None:
    dims, ratio, counts = PROBLEMS[problem]
    rng = np.random.default_rng(SOURCES.index(source))
    scales = [NoiseScale() for _ in range(TRIALS)]
    shares = np.array(counts) / sum(counts)
    for step in range(STEPS):
        parts = gradients(rng, dims, ratio, counts) * shares[:, None]
        squares = np.square(parts).sum(2)
        whole = np.square(parts.sum(1)).sum(1)
        for trial, scale in enumerate(scales):
            scale.add_parts(step, source, squares[trial], whole[trial], sequences=counts)
    right = truth(dims, ratio, counts)
    assert np.mean([covered(scale, right) for scale in scales]) >= 0.9
    if ratio <= 1:
        assert np.median([s.values()[0].scalars["health/gns"] for s in scales]) == pytest.approx(
            right, rel=0.1
        )


@pytest.mark.parametrize("problem", [name for name in PROBLEMS if "unequal" not in name])
def test_the_interval_covers_the_truth_consecutive(problem: str) -> None:
    dims, ratio, counts = PROBLEMS[problem]
    batch = Batch(sequences=sum(counts))
    rng = np.random.default_rng(7)
    scales = [NoiseScale() for _ in range(TRIALS)]
    for step in range(STEPS):
        x, y = (gradients(rng, dims, ratio, [sum(counts)])[:, 0] for _ in range(2))
        inner, before, now = (x * y).sum(1), np.square(x).sum(1), np.square(y).sum(1)
        for t, scale in enumerate(scales):
            scale.add_consecutive(10 * step, inner[t], before[t], now[t], batch, batch)
    right = truth(dims, ratio, counts)
    assert np.mean([covered(scale, right) for scale in scales]) >= 0.9


# -- with as many dimensions as models have ----------------------------------------------------------------

# In few dimensions ‖g‖² itself is so noisy that a scale far above the batch is hardly ever told. Not here.
# Name: dimensions, B over the batch, tokens of the parts.
WIDE = {
    "B/batch 0.01": (40, 0.01, [1025, 1025, 1025, 1025]),
    "B/batch 0.01, unequal": (40, 0.01, [100, 1000, 3000]),
    "B/batch 1": (1000, 1.0, [500, 500, 500]),
    "B/batch 1, unequal": (1000, 1.0, [100, 400, 1000]),
    "B/batch 10": (10**6, 10.0, [40_000, 40_000, 40_000, 40_000]),
    "B/batch 10, unequal": (10**6, 10.0, [10_000, 50_000, 100_000]),
    "B/batch 100": (10**6, 100.0, [4000, 4000, 4000, 4000]),
    "B/batch 100, unequal": (10**7, 100.0, [10_000, 50_000, 100_000]),
}


def wide_gradients(rng: np.random.Generator, dims: int, right: float, counts: list[int]) -> np.ndarray:
    """The same for B = ``right``, in a coordinate more than there are parts: ``[trials, parts, parts + 1]``.

    With a = x·δ and e = a − σ·noise a part's gradient is Σae/n along δ; across, it is Gaussian of variance
    Σe²/n² in every other dimension. Lengths and products of Gaussian vectors are those of the rows of
    Bartlett's triangle (1933), with roots of χ² on its diagonal and normals below: of the parts' directions
    across δ, and of the two vectors a and noise that are as long as a part has tokens.
    """
    sigma = math.sqrt(max(right - dims - 1, 0.0) / dims)
    across = triangles(rng, len(counts), dims - 1)
    found = np.empty((TRIALS, len(counts), len(counts) + 1))
    for part, count in enumerate(counts):
        a, noise = triangles(rng, 2, count).transpose(1, 0, 2)
        e = a - sigma * noise
        found[:, part, 0] = (a * e).sum(1) / count
        found[:, part, 1:] = np.sqrt(np.square(e).sum(1, keepdims=True)) / count * across[:, part]
    return found


def triangles(rng: np.random.Generator, vectors: int, dims: int) -> np.ndarray:
    found = np.tril(rng.standard_normal((TRIALS, vectors, vectors)), -1)
    for i in range(vectors):
        found[:, i, i] = np.sqrt(rng.chisquare(dims - i, TRIALS))
    return found


def test_wide_gradients_are_the_plain_ones() -> None:
    """Means and spreads of squared lengths and inner products, of both ways to draw them."""
    dims, ratio, counts = 12, 2.0, [3, 9]
    rng = np.random.default_rng(0)
    plain = np.concatenate([gradients(rng, dims, ratio, counts) for _ in range(40)])
    wide = np.concatenate([wide_gradients(rng, dims, truth(dims, ratio, counts), counts) for _ in range(40)])
    for a, b in ((0, 0), (0, 1), (1, 1)):
        left, right = ((drawn[:, a] * drawn[:, b]).sum(1) for drawn in (plain, wide))
        assert abs(left.mean() - right.mean()) < 4 * math.hypot(left.std(), right.std()) / len(left) ** 0.5
        assert left.std() == pytest.approx(right.std(), rel=0.1)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("problem", WIDE)
def test_the_interval_itself_covers_the_truth(problem: str, source: str) -> None:
    """A number is told, not a bound, and ±1.96 of its error hold the truth in at least 90% of trials."""
    dims, ratio, counts = WIDE[problem]
    right = ratio * sum(counts)
    assert right >= dims + 1  # it is the variance of the noise that makes up the rest
    if source == "consecutive":
        counts = [sum(counts) // (2 if "unequal" in problem else 1), sum(counts)]
    rng = np.random.default_rng(SOURCES.index(source))
    scales = [NoiseScale() for _ in range(TRIALS)]
    for step in range(STEPS):
        drawn = wide_gradients(rng, dims, right, counts)
        for scale, own in zip(scales, drawn, strict=True):
            if source == "consecutive":
                (before, inner), (_, now) = own @ own.T
                batches = [Batch(tokens=count, sequences=count / 100) for count in counts]
                scale.add_consecutive(step, inner, before, now, *batches)
                continue
            parts = own * (np.array(counts) / sum(counts))[:, None]
            squares, whole = np.square(parts).sum(1), float(np.square(parts.sum(0)).sum())
            scale.add_parts(step, source, squares, whole, tokens=counts, sequences=np.array(counts) / 100)
    found = [scale.values()[0].scalars for scale in scales]
    told = [one for one in found if "health/gns" in one]
    assert len(told) >= 0.95 * TRIALS
    covers = [abs(one["health/gns_tokens"] - right) <= 1.96 * one["health/gns_tokens_se"] for one in told]
    assert np.mean(covers) >= 0.9
    assert np.median([one["health/gns"] for one in told]) == pytest.approx(right / 100, rel=0.05)


def test_a_scale_far_above_the_batch_is_a_lower_bound() -> None:
    dims, ratio, counts = PROBLEMS["B/batch 100"]
    rng = np.random.default_rng(1)
    scale = NoiseScale()
    for step in range(STEPS):
        parts = gradients(rng, dims, ratio, counts)[0] / len(counts)
        scale.add_parts(
            step, "rank", np.square(parts).sum(1), np.square(parts.sum(0)).sum(), sequences=counts
        )
    values, labels = scale.values()
    assert labels == {"health/gns_source": "rank"}
    assert "health/gns" not in values.scalars
    assert 0 < values.scalars["health/gns_lower"] <= 800
    assert values.scalars["health/gns_ratio_lower"] == pytest.approx(values.scalars["health/gns_lower"] / 8)


def test_parts_are_unbiased_whatever_their_shares() -> None:
    """Means of micro-batch means: the shares are equal although the counts are not."""
    counts = [2, 3, 11]
    rng = np.random.default_rng(0)
    scale = NoiseScale(window=4000, rate=1e-9)
    for step in range(8):
        parts = gradients(rng, 15, 1.0, counts) / 3
        for t in range(TRIALS):
            scale.add_parts(
                step,
                "microbatch",
                np.square(parts[t]).sum(1),
                np.square(parts[t].sum(0)).sum(),
                sequences=counts,
                shares=[1 / 3] * 3,
            )
    values, _ = scale.values()
    assert values.scalars["health/gns"] == pytest.approx(16.0, rel=0.06)


def exact_step(scale: NoiseScale, step: int, source: str = "microbatch", noise: float = 50.0) -> None:
    """A step without chance: |G|² = 2, tr(Σ) of a token ``noise`` (with a small wobble)."""
    tokens, shares = np.array([100.0, 300.0]), np.array([0.25, 0.75])
    noise *= 1 + 0.01 * (-1) ** step
    squares = shares**2 * (2.0 + noise / tokens)
    whole = 2.0 + noise / 400.0
    scale.add_parts(step, source, squares, whole, tokens=tokens, sequences=[1, 3])


def test_units() -> None:
    scale = NoiseScale()
    for step in range(20):
        exact_step(scale, step)
    values, labels = scale.values()
    assert values.scalars["health/gns_tokens"] == pytest.approx(25.0, rel=0.01)
    assert values.scalars["health/gns"] == pytest.approx(0.25, rel=0.01)
    assert values.scalars["health/gns_ratio"] == pytest.approx(25.0 / 400, rel=0.01)
    assert 0 < values.scalars["health/gns_se"] < 0.01
    assert labels == {"health/gns_source": "microbatch"}
    assert values.unavailable == {}


def test_tokens_without_sequences_and_the_other_way_round() -> None:
    scale = NoiseScale()
    for step in range(9):
        scale.add_parts(step, "rank", [1.0, 1.1], 3.0 + 0.01 * step, tokens=[50, 50])
    values, _ = scale.values()
    assert "health/gns_tokens" in values.scalars and "health/gns_tokens_se" in values.scalars
    assert "health/gns" not in values.scalars and "health/gns" in values.unavailable
    scale = NoiseScale()
    for step in range(9):
        scale.add_parts(step, "rank", [1.0, 1.1], 3.0 + 0.01 * step, sequences=[50, 50])
    values, _ = scale.values()
    assert "health/gns" in values.scalars and "health/gns_tokens" not in values.scalars


def test_without_any_sizes_only_the_ratio_to_the_batch_is_told() -> None:
    sized, unsized = NoiseScale(), NoiseScale()
    for step in range(9):
        sized.add_parts(step, "rank", [1.0, 1.1], 3.0 + 0.01 * step, sequences=[50, 50])
        unsized.add_parts(step, "rank", [1.0, 1.1], 3.0 + 0.01 * step)
    values, _ = unsized.values()
    assert set(values.scalars) == {"health/gns_ratio", "health/gns_ratio_se"}
    expected = sized.values()[0].scalars["health/gns_ratio"]
    assert values.scalars["health/gns_ratio"] == pytest.approx(expected, rel=1e-12)
    assert "health/gns" in values.unavailable


def test_tokens_counted_from_some_step_on_begin_anew() -> None:
    scale = NoiseScale()
    for step in range(9):
        scale.add_parts(step, "rank", [1.0, 1.1], 3.0, sequences=[50, 50])
    exact_step(scale, 9, "rank")
    assert scale.source is None


class TestSources:
    def test_the_best_one_counts(self) -> None:
        scale = NoiseScale()
        for step in range(20):
            for source in ("rank", "microbatch"):
                exact_step(scale, step, source)
        assert scale.source == "microbatch"

    def test_one_that_fell_silent_does_not(self) -> None:
        scale = NoiseScale()
        batch = Batch(tokens=400, sequences=4)
        for step in range(60):
            if step < 20:
                exact_step(scale, step)
            scale.add_consecutive(step, 2.0, 2.1 + 0.01 * (step % 3), 2.1, batch, batch)
            expected = None if step < 7 else "microbatch" if step < 27 else "consecutive"
            assert scale.source == expected

    def test_too_few_steps(self) -> None:
        scale = NoiseScale()
        for step in range(7):
            exact_step(scale, step)
        values, labels = scale.values()
        assert values.scalars == {} and labels == {}
        assert values.unavailable == {"health/gns": "needs 8 steps that tell the noise, has seen 7"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(bad: float) -> None:
    scale = NoiseScale()
    for step in range(10):
        exact_step(scale, step)
    before = scale.values()
    scale.add_parts(10, "microbatch", [1.0, bad], 2.0, tokens=[5, 5])
    scale.add_parts(10, "microbatch", [1.0, 1.0], bad, tokens=[5, 5])
    scale.add_consecutive(10, bad, 1.0, 1.0, Batch(5), Batch(5))
    assert scale.values() == before


def test_parts_without_tokens_are_left_out() -> None:
    scale, other = NoiseScale(), NoiseScale()
    for step in range(10):
        exact_step(scale, step)
        tokens, shares = np.array([100.0, 0.0, 300.0]), np.array([0.25, 0.0, 0.75])
        noise = 50.0 * (1 + 0.01 * (-1) ** step)
        squares = shares**2 * (2.0 + noise / np.maximum(tokens, 1))
        other.add_parts(step, "microbatch", squares, 2.0 + noise / 400, tokens=tokens, sequences=[1, 0, 3])
    assert other.values() == scale.values()
    other.add_parts(11, "microbatch", [1.0, 0.0], 1.0, tokens=[5, 0])
    assert other.values() == scale.values()


def test_means_over_micro_batches_of_which_one_has_no_token() -> None:
    """Their weights do not add up to 1, and the gradient is smaller by as much."""
    scale, other = NoiseScale(), NoiseScale()
    for step in range(10):
        noise = 50.0 * (1 + 0.01 * (-1) ** step)
        squares = np.array([2.0 + noise / 100, 2.0 + noise / 300])
        whole = 2.0 + noise / 4 * (1 / 100 + 1 / 300)
        scale.add_parts(step, "rank", squares / 4, whole, tokens=[100, 300], shares=[1 / 2] * 2)
        squares = np.append(squares, 0.0) / 9
        other.add_parts(step, "rank", squares, whole * 4 / 9, tokens=[100, 300, 0], shares=[1 / 3] * 3)
    assert scale.values()[0].scalars["health/gns_tokens"] == pytest.approx(25.0, rel=0.01)
    assert other.values()[0].scalars == pytest.approx(scale.values()[0].scalars)


def test_a_part_that_counts_for_nothing_is_left_out() -> None:
    scale, other = NoiseScale(), NoiseScale()
    for step in range(10):
        squares, whole = [1.0 + 0.1 * (step % 2), 1.2], 3.0
        scale.add_parts(step, "rank", squares, whole, sequences=[50, 50])
        other.add_parts(step, "rank", [*squares, 0.0], whole, sequences=[50, 50, 7], shares=[0.5, 0.5, 0.0])
    assert other.values()[0].scalars["health/gns"] == pytest.approx(scale.values()[0].scalars["health/gns"])


def test_consecutive_steps_of_which_one_has_no_tokens_are_not_mixed() -> None:
    """A token and a sequence have different covariances."""
    scale = NoiseScale()
    for step in range(20):
        sizes = [Batch(tokens=400, sequences=4), Batch(sequences=4)]
        scale.add_consecutive(step, 2.0, 2.1, 2.1, *(sizes if step % 2 else sizes[::-1]))
    assert scale.source is None


def test_consecutive_batches_of_different_sizes() -> None:
    scale = NoiseScale()
    for step in range(20):
        noise = 50.0 * (1 + 0.01 * (-1) ** step)
        scale.add_consecutive(
            step, 2.0, 2 + noise / 100, 2 + noise / 400, Batch(tokens=100), Batch(tokens=400)
        )
    assert scale.values()[0].scalars["health/gns_tokens"] == pytest.approx(25.0, rel=0.01)


def test_the_state_is_plain_and_goes_on_alike() -> None:
    scale = NoiseScale(window=16)
    for step in range(30):
        exact_step(scale, step)
    batch = Batch(tokens=10.0)
    scale.add_consecutive(31, 1.0, 2.0, 2.0, batch, batch)
    state: Any = json.loads(json.dumps(scale.state_dict()))
    assert len(state["microbatch"]["seen"]) == 16
    other = NoiseScale(window=16)
    other.load_state_dict(state)
    for one in (scale, other):
        exact_step(one, 32)
    assert str(other.values()) == str(scale.values())
    with pytest.raises((KeyError, TypeError, ValueError)):
        other.load_state_dict({"microbatch": {"seen": [["x"]]}})
    assert str(other.values()) == str(scale.values())


def test_equal_weights_give_the_textbook_error() -> None:
    rng = np.random.default_rng(0)
    signal = 5 + 0.1 * rng.standard_normal(400)
    noise = 10 + 2.0 * rng.standard_normal(400)
    found = ratio_estimate(signal, noise, np.full(400, 1 / 400))
    residual = noise - found.ratio * signal
    expected = residual.std(ddof=1) / math.sqrt(400) / signal.mean()
    assert found.ratio == pytest.approx(noise.mean() / signal.mean())
    assert found.error == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1e9, 1.960)]
)
def test_quantiles_of_student_t(degrees: float, quantile: float) -> None:
    assert _t95(degrees) == pytest.approx(quantile, rel=0.01)


def test_no_torch_is_needed() -> None:
    program = "import sys\nsys.modules['torch'] = None\nimport palingenesis.signals.noise_scale"
    subprocess.run([sys.executable, "-c", program], check=True)
