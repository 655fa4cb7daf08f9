"""Statistics of the last losses against exact rational arithmetic."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.signals.losses import WINDOW, Losses

MEAN, STD, CV = "health/loss_mean", "health/loss_std", "health/loss_cv"

LOSSES = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=False),
    st.floats(-1e3, 1e3),
    st.sampled_from([0.0, 2.5, 1e308, -1e308, 1e-300]),
)


def noted(*losses: float) -> dict[str, float]:
    window = Losses()
    for loss in losses:
        window.note(loss)
    return window.values().scalars


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(LOSSES, max_size=130))
def test_like_exact_arithmetic(losses: list[float]) -> None:
    kept = [Fraction(loss) for loss in losses if math.isfinite(loss)][-WINDOW:]
    values = noted(*losses)
    if not kept:
        assert values == {}
        return
    largest = max(abs(float(loss)) for loss in kept)
    mean = sum(kept) / len(kept)
    assert values[MEAN] == pytest.approx(float(mean), rel=1e-12, abs=largest * 1e-14)
    assert (STD in values) == (len(kept) > 1)
    if len(kept) > 1 and largest:
        scaled = [loss / Fraction(largest) for loss in kept]
        center = sum(scaled) / len(scaled)
        variance = sum((loss - center) ** 2 for loss in scaled) / (len(scaled) - 1)
        assert values[STD] / largest == pytest.approx(math.sqrt(variance), rel=1e-9, abs=1e-14)
    if CV in values:
        assert values[CV] == pytest.approx(values[STD] / abs(values[MEAN]), rel=1e-12)


def test_a_small_spread_on_a_high_level_keeps_its_digits() -> None:
    losses = [1e8 + i % 3 for i in range(99)]
    values = noted(*losses)
    assert values[STD] == pytest.approx(statistics.stdev([i % 3 for i in range(99)]), rel=1e-6)
    assert values[CV] == pytest.approx(values[STD] / 1e8, rel=1e-6)


def test_the_window_is_the_last_hundred_finite_losses() -> None:
    assert noted(*[1000.0] * 5, *[1.0, 3.0] * 50)[MEAN] == 2.0
    assert noted(*[1.0, 3.0] * 50, *[math.nan, math.inf] * 60)[MEAN] == 2.0


def test_signs_and_zeros() -> None:
    assert noted(-2.0, -4.0) == {
        MEAN: -3.0,
        STD: pytest.approx(math.sqrt(2)),
        CV: pytest.approx(math.sqrt(2) / 3),
    }
    assert noted(-1.0, 1.0) == {MEAN: 0.0, STD: pytest.approx(math.sqrt(2))}
    assert noted(0.0, 0.0) == {MEAN: 0.0, STD: 0.0}
    assert noted(2.0) == {MEAN: 2.0}
    assert noted() == noted(math.nan) == {}


def test_the_window_survives_a_restart() -> None:
    first, second = Losses(), Losses()
    for i in range(150):
        first.note(i**0.5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for window in (first, second):
        window.note(0.25)
    assert first.values() == second.values()


def test_no_torch_is_imported() -> None:
    program = "import sys, palingenesis.signals.losses; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
