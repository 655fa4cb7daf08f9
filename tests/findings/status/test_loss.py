"""The loss of a status: trends that are there, and none where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runlogs.made import made

from palingenesis.findings.curve.evaluation import evaluations_of
from palingenesis.findings.status import Status, status_of
from palingenesis.runlogs.table import Restart

NOW = 1.8e9


def curve(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """A healthy loss: it falls or has fallen, under noise of several kinds."""
    steps = np.arange(n)
    falls = 2 + rng.uniform(0.2, 4) * np.exp(-steps / rng.uniform(0.05, 0.6) / n)
    noise = rng.uniform(0.01, 0.3)
    if kind == "white":
        return falls + noise * rng.standard_normal(n)
    if kind == "heavy":
        return falls + noise * rng.standard_t(3, n)
    if kind == "log-normal":
        return falls * np.exp(noise * rng.standard_normal(n))
    white = noise * rng.standard_normal(n)
    together = np.empty(n)
    together[0] = white[0]
    for at in range(1, n):  # neighbours hang together, as batches of one document do
        together[at] = 0.5 * together[at - 1] + white[at]
    return falls + together


def checks(status: Status) -> set[str]:
    return {finding.check for finding in status.findings}


@pytest.mark.parametrize("kind", ["white", "heavy", "log-normal", "correlated"])
def test_healthy_runs_are_healthy_whenever_one_looks(kind: str) -> None:
    rng = np.random.default_rng(0)
    rang, looks = 0, 0
    for _ in range(60):
        loss = curve(rng, kind, int(rng.integers(30, 3000)))
        for part in (0.2, 0.5, 1.0):
            status = status_of(made(loss[: int(part * len(loss))]), NOW)
            looks += 1
            rang += bool(checks(status))
            assert status.verdict in ("HEALTHY", "UNKNOWN") or checks(status)
    assert rang / looks <= 0.01


@pytest.mark.parametrize("kind", ["white", "heavy", "log-normal", "correlated"])
def test_a_loss_that_rises_is_found(kind: str) -> None:
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(60):
        n = int(rng.integers(200, 2000))
        loss = curve(rng, kind, n)
        since = int(rng.uniform(0.5, 0.8) * n)
        loss[since:] += np.linspace(0, rng.uniform(1.5, 5), n - since)
        found += "status.diverging" in checks(status_of(made(loss), NOW))
    assert found / 60 >= 0.95


def test_a_rise_long_ago_that_was_never_made_up_for_is_found() -> None:
    rng = np.random.default_rng(2)
    loss = curve(rng, "white", 1000)
    loss[300:] += 2
    status = status_of(made(loss), NOW)
    (finding,) = status.findings
    assert finding.check == "status.diverging"
    assert finding.evidence["lowest"] < finding.evidence["now"] - 1.5
    assert finding.evidence["lowest_step"] <= 300
    assert status.verdict == "WARNING"
    assert status.loss is not None and status.loss.direction != "rising"


def test_losses_below_zero_are_judged_alike() -> None:
    rng = np.random.default_rng(3)
    falling = -2 - np.linspace(0, 3, 400) + 0.1 * rng.standard_normal(400)
    status = status_of(made(falling), NOW)
    assert status.verdict == "HEALTHY"
    assert status.loss is not None and status.loss.direction == "falling"
    rising = status_of(made(falling[::-1].copy()), NOW)
    assert "status.diverging" in checks(rising)


def test_the_slope_is_that_of_the_curve() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(100):
        loss = 5 - 0.002 * np.arange(800) + 0.1 * rng.standard_normal(800)
        now = status_of(made(loss), NOW).loss
        assert now is not None
        assert now.steps == 199 and now.losses == 200
        covered += now.least <= -0.002 * now.steps <= now.most
    assert covered >= 95  # 98% are meant


def test_flat_is_said_where_it_is_known_only() -> None:
    rng = np.random.default_rng(5)
    quiet = status_of(made(2 + 0.001 * rng.standard_normal(400)), NOW).loss
    loud = status_of(made(2 + 0.5 * rng.standard_normal(60)), NOW).loss
    assert quiet is not None and quiet.direction == "flat"
    assert loud is not None and loud.direction == "unclear"


def test_what_the_digits_of_a_log_cannot_show_is_flat() -> None:
    loss = np.where(np.arange(300) % 2, 0.01, 0.02)
    now = status_of(made(loss, resolution=0.01), NOW).loss
    assert now is not None and now.direction == "flat"


def test_a_loss_that_falls_to_zero_stands_for_something_else() -> None:
    loss = np.append(np.linspace(5, 4, 50), np.zeros(10))
    status = status_of(made(loss, resolution=1e-4), NOW)
    assert status.verdict == "CRITICAL"
    assert "since step 51" in status.sentence
    # One that went down there step by step was only rounded.
    small = np.append(np.geomspace(1, 1e-4, 50), np.zeros(10))
    assert checks(status_of(made(small, resolution=1e-4), NOW)) == set()


def test_rows_that_were_run_again_do_not_count() -> None:
    rng = np.random.default_rng(6)
    before = np.linspace(5, 3, 200) + 0.05 * rng.standard_normal(200)
    before[150:] = np.nan
    again = 5 - 0.01 * np.arange(101, 301) + 0.05 * rng.standard_normal(200)
    steps = np.concatenate([np.arange(1, 201), np.arange(101, 301)])
    log = made(np.concatenate([before, again]), step=steps, restarts=(Restart(200, 200.0, 101.0),))
    status = status_of(log, NOW)
    assert checks(status) == {"status.restarted"}
    assert status.verdict == "HEALTHY" and status.step == 300


def test_the_gap_is_that_of_the_curve_and_not_of_one_step() -> None:
    """`pgs monitor` and `pgs loss` tell the same; what is logged with an evaluation is of one batch."""
    loss = np.random.default_rng(0).normal(2.0, 0.3, 100)
    every = np.full(100, np.nan)
    every[[49, 99]] = 2.2, 2.1
    log = made(loss, eval_loss=every, **{"eval/gap": every - loss})
    found = status_of(log, NOW).evaluations
    assert found is not None
    assert found.gap == pytest.approx(2.1 - np.median(loss[80:]))
    (one,) = evaluations_of(log)
    assert one.gap == found.gap


def test_evaluations_have_a_best_and_a_gap() -> None:
    loss = np.linspace(3, 2, 100)
    evaluated = np.full(100, np.nan)
    evaluated[[19, 39, 59, 79]] = [3.0, 2.8, 2.7, 2.9]
    found = status_of(made(loss, eval_loss=evaluated), NOW).evaluations
    assert found is not None
    assert (found.last, found.step, found.best, found.best_step, found.count) == (2.9, 80, 2.7, 60, 4)
    assert found.gap == pytest.approx(2.9 - np.median(loss[60:80]))


def test_sources_without_a_whole_are_told_each() -> None:
    values = np.linspace(3, 2, 20)
    one, other = np.full(20, np.nan), np.full(20, np.nan)
    one[[9, 19]], other[19] = [4, 3.5], 7
    found = status_of(made(values, **{"eval/wiki/loss": one, "eval/code/loss": other}), NOW).evaluations
    assert found is not None and found.sources == {"code": 7.0, "wiki": 3.5}
    assert found.last == 3.5


def test_few_losses_are_too_few_to_judge_by() -> None:
    status = status_of(made([3.0, 2.9, 2.8]), NOW)
    assert status.verdict == "UNKNOWN" and "3 losses" in status.sentence
    assert status.findings == ()
