"""Skipped steps by what a log says of them, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runlogs.made import made

from palingenesis.findings.pathologies import pathologies_of
from palingenesis.findings.skips import scaled_away, skips_of
from palingenesis.findings.status import status_of
from palingenesis.runlogs.table import LogEvent, RunLog

ROWS = 80
FALLING = np.linspace(3, 2, ROWS)
EVERY_TENTH = 10.0 * np.arange(1, ROWS + 1)


def skip(step: float, text: str = "OVERFLOW! Rank 0 Skipping step.") -> LogEvent:
    return LogEvent("overflow", step, 1, text)


def checks(log: RunLog) -> list[str]:
    return [one.check for one in pathologies_of(log)]


def test_several_steps_between_two_rows_count_each() -> None:
    """Two of the ten steps behind every row: a fifth of the run."""
    told = tuple(skip(step) for step in EVERY_TENTH for _ in range(2))
    log = made(FALLING, EVERY_TENTH, events=told)
    found = skips_of(log)
    assert (found.steps, found.of, found.at_most) == (160, 800.0, False)
    assert status_of(log, 1e9).skipped.share == pytest.approx(0.2)
    assert checks(log) == ["run.steps_skipped"]


def test_every_step_a_row_counts_once_whoever_tells() -> None:
    told = tuple(
        one
        for step in (5.0, 9.0)
        for one in (
            skip(step),
            skip(step, "OVERFLOW! Rank 1 Skipping step."),
            LogEvent("skipped", step, 1, "step skipped"),
        )
    )
    assert skips_of(made(FALLING, events=told)).steps == 2
    assert skips_of(made(FALLING, EVERY_TENTH, events=told)).steps == 2


def test_rows_that_are_counted_may_stand_for_many_steps() -> None:
    """166 of 800 steps; the log has 80 rows and no steps. The share is told as the most that it can be."""
    each = np.random.default_rng(0).multinomial(166, np.full(ROWS, 1 / ROWS))
    told = tuple(skip(float(row)) for row, times in enumerate(each, 1) for _ in range(times))
    log = made(FALLING, events=told, step_inferred=True)
    found = skips_of(log)
    assert (found.steps, found.of, found.at_most) == (166, ROWS * float(each.max()), True)
    status = status_of(log, 1e9)
    assert "at most" in status.findings[0].message and status.verdict == "WARNING"
    (finding,) = [one for one in pathologies_of(log) if one.check == "run.steps_skipped"]
    assert "166 steps (at most" in finding.message and finding.severity == "warning"


def test_a_loss_scale_that_finds_its_level_between_two_counted_rows_is_no_trouble() -> None:
    log = made(FALLING, events=tuple(skip(1.0) for _ in range(8)), step_inferred=True)
    assert status_of(log, 1e9).findings == () and checks(log) == []


def test_norms_at_skips_that_a_log_counts_are_of_the_loss_scale() -> None:
    """Megatron counts skipped iterations and has no message of them."""
    skipped, norm = np.zeros(ROWS), np.ones(ROWS)
    skipped[[0, 1, 40, 79]] = 1
    norm[skipped > 0] = np.inf
    log = made(FALLING, grad_norm=norm, **{"train/skipped_steps": np.cumsum(skipped)})
    assert scaled_away(log, log.live("train/grad_norm"))
    assert checks(log) == []
    assert [one.check for one in status_of(log, 1e9).findings] == ["status.loss_scale"]
    norm[20] = np.inf
    log = made(FALLING, grad_norm=norm, **{"train/skipped_steps": np.cumsum(skipped)})
    assert checks(log) == ["run.nonfinite"]


def test_norms_that_are_lost_to_the_end_are_no_loss_scale() -> None:
    norm = np.ones(ROWS)
    norm[60:] = np.inf
    told = tuple(skip(float(step)) for step in range(61, ROWS + 1))
    log = made(FALLING, grad_norm=norm, events=told)
    assert not scaled_away(log, log.live("train/grad_norm"))


def test_the_first_skip_is_named_where_a_log_counts_them() -> None:
    count = np.floor(np.arange(ROWS) / 10)
    log = made(FALLING, **{"train/skipped_steps": count})
    (finding,) = [one for one in pathologies_of(log) if one.check == "run.steps_skipped"]
    assert finding.since == 11
