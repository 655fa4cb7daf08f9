"""Trends and medians: right on lines, unmoved by wild values, and sure only as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from palingenesis.findings.trends import median, spread, trend

ALPHA = 0.01


def test_a_line_is_found_exactly() -> None:
    x = np.arange(20.0)
    line = trend(x, 3 - 0.5 * x, ALPHA)
    assert line.slope == pytest.approx(-0.5)
    assert line.low == pytest.approx(-0.5)
    assert line.high == pytest.approx(-0.5)
    assert line.change == pytest.approx(-9.5)


def test_wild_values_do_not_move_it() -> None:
    rng = np.random.default_rng(0)
    x = np.arange(200.0)
    y = 2 + 0.01 * x + rng.normal(0, 0.05, 200)
    y[rng.choice(200, 30, replace=False)] += 50
    line = trend(x, y, ALPHA)
    assert line.slope == pytest.approx(0.01, rel=0.1)
    assert line.low > 0


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_too_few_points_are_never_sure(count: int) -> None:
    line = trend(np.arange(float(count)), np.arange(float(count)), ALPHA)
    assert line.low == -math.inf
    assert line.high == math.inf


def test_five_points_in_order_are_enough() -> None:
    assert trend(np.arange(5.0), np.array([1.0, 2.0, 2.5, 4.0, 7.0]), ALPHA).low > 0


def test_all_at_one_place_has_no_slope() -> None:
    assert math.isnan(trend(np.zeros(8), np.arange(8.0), ALPHA).slope)


@pytest.mark.parametrize("count", [8, 30, 300])
@pytest.mark.parametrize("noise", ["normal", "heavy", "skewed"])
def test_noise_alone_is_called_a_trend_as_rarely_as_it_says(count: int, noise: str) -> None:
    rng = np.random.default_rng(count)
    x = np.arange(float(count))
    wrong = 0
    trials = 1000
    for _ in range(trials):
        if noise == "normal":
            y = rng.normal(size=count)
        elif noise == "heavy":
            y = rng.standard_t(2, size=count)
        else:
            y = rng.lognormal(size=count)
        wrong += trend(x, y, ALPHA).low > 0
    # Three standard deviations above one in a hundred.
    assert wrong / trials <= ALPHA + 3 * math.sqrt(ALPHA / trials)


def test_a_trend_that_is_there_is_found() -> None:
    rng = np.random.default_rng(1)
    x = np.arange(60.0)
    seen = sum(trend(x, 0.05 * x + rng.normal(size=60), ALPHA).low > 0 for _ in range(100))
    assert seen >= 95


def test_a_median_has_the_sign_tests_interval() -> None:
    middle = median(np.arange(7.0), ALPHA)
    assert middle == (3.0, 0.0, 6.0)
    assert median(np.arange(6.0), ALPHA).low == -math.inf
    assert math.isnan(median(np.empty(0), ALPHA).value)


@pytest.mark.parametrize("count", [7, 20, 201])
def test_the_interval_of_a_median_holds_it(count: int) -> None:
    rng = np.random.default_rng(count)
    trials = 2000
    below = sum(median(rng.exponential(size=count), ALPHA).low > math.log(2) for _ in range(trials))
    assert below / trials <= ALPHA + 3 * math.sqrt(ALPHA / trials)


def test_spread_is_the_standard_deviation_of_normal_noise() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(5, 2, 20_000)
    values[:500] = 1e6
    assert spread(values) == pytest.approx(2, rel=0.08)
    assert math.isnan(spread(np.empty(0)))
