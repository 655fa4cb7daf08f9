"""Logs looked at again and again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from palingenesis.errors import RunLogError
from palingenesis.findings.status.source import Watch, look, report_of


def line(step: int, loss: float) -> str:
    return (
        f"{{'loss': '{loss:.4g}', 'grad_norm': '1.1', 'learning_rate': '0.001', 'epoch': '{step / 10:g}'}}\n"
    )


def test_one_loss_is_too_little(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(line(1, 3.2))
    with pytest.raises(RunLogError, match=r"one loss only \(3.2 at step"):
        look(log)
    assert Watch(log).look() is None  # there may be more


def test_a_watch_sees_what_comes_and_learns_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This format has no times: they are those of the watcher."""
    log = tmp_path / "a.log"
    log.write_text("")
    watch = Watch(log)
    assert watch.look() is None
    clock = time.time()
    for step in range(1, 41):
        with log.open("a") as file:
            file.write(line(step, 3 - step / 20))
        clock += 2.0
        os.utime(log, (clock, clock))
        monkeypatch.setattr("palingenesis.findings.status.source.time.time", lambda now=clock: now)
        status = watch.look()
    assert status is not None and status.step == 40 and status.step_inferred
    assert status.speed is not None and status.speed.step_time_s == pytest.approx(2.0)
    assert not status.over and status.verdict == "HEALTHY"


def test_a_run_that_starts_again_is_told_so(tmp_path: Path) -> None:
    def rows(first: int, last: int) -> str:
        return "".join(
            f"iter {step}: loss {3 - step / 100:.4f}, time 500.00ms, mfu 30.00%\n"
            for step in range(first, last)
        )

    log = tmp_path / "a.log"
    log.write_text(rows(0, 60))
    watch = Watch(log)
    first = watch.look()
    log.unlink()  # rotated away
    log.write_text(rows(40, 80))
    second = watch.look()
    assert first is not None and second is not None
    assert (first.step, second.step, second.restarts) == (59, 79, 1)


def test_the_report_holds_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(line(step, 3 - step / 20) for step in range(1, 41)))
    status = look(log)
    report = report_of(status)
    assert report.findings == status.findings and "findings" not in report.facts
    assert report.facts["loss"]["level"] == pytest.approx(1.225)


def test_a_writer_that_fills_blocks_is_not_stalled(tmp_path: Path) -> None:
    """Rows a second apart that come 8,192 bytes at a time: some minutes of silence say nothing."""

    def row(step: int) -> str:
        clock = f"{10 + step // 3600}:{step // 60 % 60:02d}:{step % 60:02d}"
        return f"2026-11-30 {clock},000 INFO step={step} loss={3 - step / 1000:.4f} lr=1.00e-04\n"

    text = "".join(row(step) for step in range(1, 2000))
    log = tmp_path / "a.jsonl"
    for size, state in ((5 * 8192, "running"), (5 * 8192 - 100, "stalled")):
        log.write_text(text[:size])
        last = 1.7e9 + text[:size].count("\n")
        os.utime(log, (last, last))
        assert _state(log, last + 200) == state
    assert _state(log, last + 2000) == "stalled"


def _state(log: Path, now: float) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("palingenesis.findings.status.source.time.time", lambda: now)
        return look(log).state
