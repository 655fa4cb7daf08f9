"""The analysis of a curve: what was planted is found, at its place, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.runlogs.made import made

from palingenesis.errors import RunLogError
from palingenesis.findings.curve import CurveAnalysis, analyse, findings_of
from palingenesis.runlogs.table import Restart

ROWS = 1500
STEPS = np.arange(1.0, ROWS + 1)


def falling(rows: int = ROWS, seed: int = 0, noise: float = 0.02) -> np.ndarray:
    """A power law with a floor of 1.5, and noise that is a share of it."""
    rng = np.random.default_rng(seed)
    at = np.arange(1.0, rows + 1)
    return (1.5 + 6 * (1 + at / 40) ** -0.5) * (1 + noise * rng.normal(size=rows))


def checks(analysis: CurveAnalysis) -> list[str]:
    return [finding.check for finding in findings_of(analysis)]


def test_a_curve_that_falls_has_nothing_but_its_law() -> None:
    analysis = analyse(made(falling()))
    assert checks(analysis) == []
    law = analysis.convergence
    assert law is not None
    assert law.law == "power law"
    assert law.exponent is not None
    assert law.exponent.low < 0.5 < law.exponent.high
    truth = 6 * ((1 + ROWS / 40) ** -0.5 - (1 + 1.2 * ROWS / 40) ** -0.5)
    assert law.gain.low < truth < law.gain.high
    assert law.more_steps == pytest.approx(0.2 * ROWS, rel=0.01)


def test_a_half_life_is_that_of_an_exponential() -> None:
    rng = np.random.default_rng(0)
    loss = 1 + 3 * np.exp(-STEPS / 500) + 0.02 * rng.normal(size=ROWS)
    law = analyse(made(loss)).convergence
    assert law is not None
    assert law.half_life is not None
    assert law.half_life.low < 500 * math.log(2) < law.half_life.high
    assert law.floor is not None
    assert law.floor.low < 1 < law.floor.high


@pytest.mark.parametrize("place", [5, 700, ROWS - 30])
@pytest.mark.parametrize("fade", [0, 6])
def test_a_spike_is_found_where_it_is(place: int, fade: int) -> None:
    loss = falling()
    after = np.arange(ROWS - place)
    loss[place:] += 1.5 * loss[place] * (np.exp(-after / fade) if fade else after == 0)
    (spike,) = analyse(made(loss)).spikes
    assert abs(spike.row - place) <= 1
    assert spike.peak == pytest.approx(loss[place], rel=1e-6)
    assert spike.ratio == pytest.approx(2.5, rel=0.15)
    assert spike.recovery_steps is not None
    assert spike.recovery_steps <= (1 if not fade else 3 * fade)


def test_spikes_are_placed_by_step_not_by_row() -> None:
    loss = falling()
    loss[700] *= 3
    (spike,) = analyse(made(loss, step=10 * STEPS)).spikes
    assert spike.step == 7010


def test_many_spikes_are_a_warning_and_one_that_is_over_is_not() -> None:
    loss = falling()
    loss[300] *= 2
    (one,) = findings_of(analyse(made(loss)))
    assert (one.check, one.severity, one.since) == ("curve.spikes", "info", 301)
    loss[[600, 900, 1200]] *= 2
    (four,) = findings_of(analyse(made(loss)))
    assert four.severity == "warning"
    assert four.evidence["steps"] == [301, 601, 901, 1201]


def test_batches_of_a_harder_kind_are_no_spikes() -> None:
    rng = np.random.default_rng(3)
    hard = rng.random(ROWS) < 0.08
    assert analyse(made(falling() * np.where(hard, 1.4, 1.0))).spikes == ()


def test_a_plateau_on_the_way() -> None:
    done = np.where(STEPS < 400, STEPS, np.where(STEPS < 900, 400, STEPS - 500))
    rng = np.random.default_rng(0)
    loss = (4 - 2 * done / 1000) * (1 + 0.03 * rng.normal(size=ROWS))
    (plateau,) = analyse(made(loss)).plateaus
    assert plateau.kind == "stretch"
    assert plateau.first_step == pytest.approx(400, abs=60)
    assert plateau.last_step == pytest.approx(900, abs=60)
    assert plateau.missed == pytest.approx(1.0, rel=0.3)
    assert plateau.level == pytest.approx(3.2, rel=0.02)


def test_a_stall_to_the_end_is_no_convergence_and_convergence_no_stall() -> None:
    rng = np.random.default_rng(0)
    noise = 1 + 0.01 * rng.normal(size=ROWS)
    stalled = analyse(made((4 - 2 * np.minimum(STEPS, 600) / 1000) * noise))
    assert [one.kind for one in stalled.plateaus] == ["stall"]
    converged = analyse(made((1 + 3 * np.exp(-STEPS / 120)) * noise))
    assert converged.plateaus == ()
    assert converged.level is not None
    assert checks(converged) == ["curve.levelled_off"]


def test_a_learning_rate_of_zero_explains_a_stall() -> None:
    rng = np.random.default_rng(0)
    loss = (4 - 2 * np.minimum(STEPS, 600) / 1000) * (1 + 0.01 * rng.normal(size=ROWS))
    rate = np.where(STEPS < 600, 1e-4, 0.0)
    assert analyse(made(loss, lr=rate)).plateaus == ()


@pytest.mark.parametrize("kind", ["rise", "jump"])
def test_a_loss_that_diverges(kind: str) -> None:
    loss = falling()
    loss[1000:] *= np.linspace(1, 1.8, 500) if kind == "rise" else 1.5
    analysis = analyse(made(loss))
    assert analysis.rise is not None
    assert analysis.rise.kind == kind
    assert analysis.rise.since_step == pytest.approx(1000, abs=150 if kind == "rise" else 20)
    assert checks(analysis) == ["curve.diverged"]


def test_a_warm_restart_of_the_schedule_is_no_divergence() -> None:
    loss, rate = falling(), np.full(ROWS, 1e-5)
    loss[1200:] *= 1.3
    rate[:300] = rate[1200:] = 1e-4
    assert analyse(made(loss, lr=rate)).rise is None


def test_a_loss_that_is_no_number() -> None:
    loss = falling()
    loss[800:] = np.nan
    analysis = analyse(made(loss))
    assert analysis.nonfinite is not None
    assert analysis.nonfinite.first_step == 801
    assert analysis.nonfinite.count == 700
    assert analysis.nonfinite.to_end
    assert checks(analysis) == ["curve.nonfinite"]


@pytest.mark.parametrize("period", [3, 24, 100])
def test_a_pattern(period: int) -> None:
    loss = falling() * (1 + 0.05 * (STEPS % period) / period)
    found = analyse(made(loss, step=5 * STEPS)).period
    assert found is not None
    assert found.rows == period
    assert found.steps == 5 * period


def test_a_restart_counts_steps_once() -> None:
    loss, steps = falling(), np.concatenate([np.arange(1.0, 801), np.arange(701.0, 1401)])
    restart = Restart(800, 800.0, 701.0)
    analysis = analyse(made(loss, step=steps, restarts=(restart,)))
    assert analysis.rows == 1400
    assert np.all(np.diff(analysis.step) > 0)
    (told,) = findings_of(analysis)
    assert told.check == "curve.restarted"
    assert told.evidence["steps_again"] == 100


def test_a_first_loss_that_is_a_guess() -> None:
    loss = falling()
    loss += (math.log(32_000) - loss[0]) * np.exp(-STEPS / 20)
    loss[0] = math.log(32_000)
    chance = analyse(made(loss)).chance
    assert chance is not None
    assert chance.vocabulary == 32_000
    assert analyse(made(falling())).chance is None


def test_evaluations_are_told() -> None:
    every = np.full(ROWS, np.nan)
    every[99::100] = np.linspace(3, 2, 15)
    every[1299::100] = 2.5
    (one,) = analyse(made(falling(), eval_loss=every)).evaluations
    assert one.best_step == 1200
    assert one.last == 2.5
    assert one.above_best > 0.1
    assert one.gap is not None


@pytest.mark.parametrize("loss", [[], [1.0]])
def test_no_curve_is_an_error_of_one_line(loss: list[float]) -> None:
    with pytest.raises(RunLogError, match="a curve needs at least 2") as error:
        analyse(made(loss))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "loss",
    [
        [2.0, 1.0],
        [1.0] * 5,
        [1.0] * 300,
        [0.0] * 300,
        [math.nan] * 50,
        [math.inf, 1.0, -math.inf] * 40,
        [1e300, 1e-300] * 100,
        list(np.linspace(5, -5, 200)),
        list(np.linspace(1, 9, 200)),
    ],
)
def test_odd_curves_are_told_without_a_fault(loss: list[float]) -> None:
    analysis = analyse(made(loss))
    for finding in findings_of(analysis):
        assert finding.message
    assert analysis.rows <= len(loss)
