"""What a status finds wrong, on logs in which it is known what is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.runlogs.made import made

from palingenesis.events import Severity
from palingenesis.findings.catalog import CATALOG
from palingenesis.findings.finding import Finding
from palingenesis.findings.status import Status, status_of
from palingenesis.findings.status.words import brief, lines
from palingenesis.runlogs.table import EventKind, LogEvent, Restart

NOW = 1.8e9
ROWS = 100


def status(loss: np.ndarray | None = None, **fields: Any) -> Status:
    """Of a run that falls from 3 to 2 in a hundred rows, but for what is given."""
    falling = np.linspace(3, 2, ROWS) if loss is None else loss
    return status_of(made(falling, **fields), NOW)


def only(found: Status) -> Finding:
    (finding,) = found.findings
    assert finding.check in CATALOG
    return finding


def events(kind: EventKind, *steps: float | None, text: str = "something") -> tuple[LogEvent, ...]:
    return tuple(LogEvent(kind, step, line, text) for line, step in enumerate(steps, 1))


def with_nan(*rows: int) -> np.ndarray:
    loss = np.linspace(3, 2, ROWS)
    loss[list(rows)] = np.nan
    return loss


def test_a_nan_is_found_anywhere() -> None:
    for at in (0, 1, 50, 98):
        finding = only(status(with_nan(at)))
        assert finding.check == "status.nonfinite" and finding.severity == "warning"
        assert finding.evidence["first_step"] == at + 1
        assert finding.since == at + 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_that_stays_is_critical(value: float) -> None:
    loss = np.linspace(3, 2, ROWS)
    loss[60:] = value
    found = status(loss)
    finding = only(found)
    assert finding.severity == "critical" and found.verdict == "CRITICAL"
    assert "first at step 61 (40 rows)" in finding.message
    assert finding.evidence["still"] == ["train/loss"]
    assert found.loss is not None and not np.isfinite(found.loss.value)


def test_norms_that_a_loss_scale_made_are_no_trouble() -> None:
    norm = np.ones(ROWS)
    norm[:4] = np.inf
    first = only(status(grad_norm=norm))
    assert (first.check, first.severity, first.evidence["rows"]) == ("status.loss_scale", "info", 4)
    norm[60] = np.inf
    assert only(status(grad_norm=norm)).check == "status.nonfinite"
    assert only(status(grad_norm=norm, events=events("overflow", 61.0))).check == "status.loss_scale"
    norm[90:] = np.inf
    assert only(status(grad_norm=norm)).severity == "critical"


def test_norms_and_evaluations_count_too() -> None:
    norm = np.ones(ROWS)
    norm[5] = np.inf
    evaluated = np.full(ROWS, np.nan)
    evaluated[[20, 40]] = [3.0, np.inf]
    finding = only(status(grad_norm=norm, eval_loss=evaluated))
    assert finding.evidence["metrics"] == {"train/grad_norm": 6, "eval/loss": 41}
    assert finding.severity == "critical"  # the last evaluation is not finite


def test_what_follows_from_a_large_loss_or_is_not_known_does_not_ring() -> None:
    ppl = np.full(ROWS, np.inf)
    assert status(**{"train/ppl": ppl}).findings == ()
    other = only(status(**{"other/reward": ppl}))
    assert other.check == "status.nonfinite_other" and other.severity == "info"


def test_a_fifth_of_the_steps_skipped_is_not_healthy() -> None:
    at = tuple(float(step) for step in range(5, ROWS + 1, 5))
    found = status(events=events("skipped", *at))
    finding = only(found)
    assert finding.check == "status.skipped" and finding.severity == "warning"
    assert finding.evidence == {"steps": 20, "share": pytest.approx(0.2)}
    assert found.skipped.share == pytest.approx(0.2)


def test_an_overflow_and_its_skip_are_one_step() -> None:
    found = status(events=events("overflow", 50.0) + events("skipped", 50.0))
    assert found.skipped.count == 1 and found.findings == ()


def test_a_loss_scale_that_finds_its_level_is_no_trouble() -> None:
    first = events("overflow", *(float(step) for step in range(1, 11)))
    assert status(events=first).findings == ()
    later = events("overflow", *(float(step) for step in range(41, 51)))
    assert only(status(events=later)).check == "status.skipped"


def test_nothing_but_skips_is_critical() -> None:
    every = events("overflow", *(float(step) for step in range(1, ROWS + 1)))
    assert only(status(events=every)).severity == "critical"


def test_counts_that_a_log_keeps_are_taken() -> None:
    count = np.floor(np.arange(ROWS) / 10)
    finding = only(status(**{"train/skipped_steps": count}))
    assert finding.evidence["steps"] == 9


def test_an_error_at_the_end_is_how_the_run_ended() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
    last = only(status(events=events("error", 100.0, text=text)))
    assert last.severity == "critical" and "CUDA out of memory" in last.message
    over = only(status(events=events("error", 40.0, text=text)))
    assert over.severity == "warning"  # sixty rows came after it


def test_warnings_about_the_run_ring_and_others_do_not() -> None:
    mine = only(
        status(events=events("warning", 5.0, 9.0, text="Watchdog caught collective operation timeout"))
    )
    assert mine.check == "status.warnings" and mine.evidence["count"] == 2
    other = only(status(events=events("warning", None, text="FutureWarning: use_cache is deprecated")))
    assert other.check == "status.remarks" and other.severity == "info"
    own = only(status(events=events("warning", 7.0, text="alarm: layer 3"), format="palingenesis"))
    assert own.check == "status.warnings"


def test_messages_that_differ_by_numbers_are_one_kind() -> None:
    told = tuple(LogEvent("warning", float(at), at, f"spike at step {at}") for at in (3, 30, 60))
    found = status(events=(*told, LogEvent("warning", 70.0, 70, "overflow")))
    assert [(one.text, one.count) for one in found.messages] == [("spike at step 60", 3), ("overflow", 1)]


def test_starts_are_told_and_failing_at_one_place_is_critical() -> None:
    once = only(status(restarts=(Restart(50, 80.0, 51.0),)))
    assert once.check == "status.restarted" and once.severity == "info"
    assert once.evidence["steps_again"] == 30
    steps = np.concatenate([np.arange(1, 41), *[np.arange(21, 41)] * 3]).astype(float)
    starts = tuple(Restart(at, 40.0, 21.0) for at in (40, 60, 80))
    loop = only(status(step=steps, restarts=starts))
    assert loop.check == "status.crash_loop" and loop.severity == "critical"
    gets_on = np.concatenate([steps[:80], np.arange(21, 61)])
    assert only(status(np.linspace(3, 2, 120), step=gets_on, restarts=starts)).check == "status.restarted"


def test_a_log_without_a_loss_says_so() -> None:
    log = made(np.empty(0), step=np.empty(0))
    finding = only(status_of(log, NOW))
    assert finding.check == "status.no_loss"


def test_lines_of_no_known_form_are_told() -> None:
    assert only(status(lines=300, unread=200)).check == "status.unread"
    assert status(lines=300, unread=100).findings == ()


def test_the_worst_decides_and_the_line_says_it() -> None:
    found = status(with_nan(*range(90, ROWS)), total_steps=200, events=events("overflow", 50.0, 51.0))
    line = brief(found)
    assert line.startswith("CRITICAL | step 100 of 200 (50%) | loss NaN")
    assert "train/loss was not finite first at step 91" in line and "\n" not in line
    assert "skipped 2.0%" in line


def test_text_of_a_log_cannot_drive_the_terminal() -> None:
    evil = "overflow \x1b[2Jx\u202e"
    found = status(events=events("warning", 3.0, text=evil), source="a\x1b[0m.log", cannot_show=("nothing",))
    text = brief(found) + "".join(text for _, text in lines(found))
    assert "\x1b" not in text and "\u202e" not in text


def test_pathologies_are_told_once_and_if_they_are_likely() -> None:
    def pathology(check: str, confidence: float | None, severity: Severity = "warning") -> Finding:
        return Finding(check, severity, check, {}, "a fix", confidence=confidence)

    given = [
        pathology("run.nonfinite", 0.99, "critical"),
        pathology("run.lr_too_high", 0.8),
        pathology("run.overfitting", 0.3),
        pathology("run.tracker_rows", 0.9, "info"),
    ]
    found = status_of(made(with_nan(50)), NOW, pathologies=given)
    assert [one.check for one in found.findings] == ["status.nonfinite", "run.lr_too_high"]
    clean = status_of(made(with_nan()), NOW, pathologies=given)
    assert [one.check for one in clean.findings] == ["run.nonfinite", "run.lr_too_high"]
    assert clean.verdict == "CRITICAL"


def test_every_line_is_told_whatever_is_missing() -> None:
    bare = dict(lines(status(np.array([3.0, 2.9]), step_inferred=True)))
    assert bare["step"] == "2 (counted: the log has no steps)"
    assert bare["time left"].startswith("unknown") and bare["speed"] == "not in the log"
    assert bare["not finite"] == "nothing"
