"""Seconds of training and seconds apart, on a clock that a test moves."""

from __future__ import annotations

import pytest

from palingenesis.sft import stopwatch
from palingenesis.sft.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    return now


def test_laps(clock: list[float]) -> None:
    watch = Stopwatch()
    clock[0] += 2.0
    assert watch.lap() == 2.0
    clock[0] += 0.5
    assert watch.lap() == 0.5
    assert watch.take_apart() == {}


def test_what_is_apart_is_not_training_and_is_told_once(clock: list[float]) -> None:
    watch = Stopwatch()
    clock[0] += 1.0
    for _ in range(2):
        with watch.apart("train/eval_s"):
            clock[0] += 4.0
    with watch.apart("train/checkpoint_s"):
        clock[0] += 8.0
    clock[0] += 2.0
    assert watch.lap() == 3.0
    assert watch.take_apart() == {"train/eval_s": 8.0, "train/checkpoint_s": 8.0}
    assert watch.take_apart() == {}
    clock[0] += 1.0
    assert watch.lap() == 1.0


def test_what_fails_apart_was_apart_too(clock: list[float]) -> None:
    watch = Stopwatch()

    def evaluate() -> None:
        with watch.apart("train/eval_s"):
            clock[0] += 4.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    clock[0] += 1.0
    assert watch.lap() == 1.0
    assert watch.take_apart() == {"train/eval_s": 4.0}


def test_a_restart_forgets(clock: list[float]) -> None:
    watch = Stopwatch()
    with watch.apart("train/eval_s"):
        clock[0] += 4.0
    clock[0] += 4.0
    watch.restart()
    clock[0] += 1.0
    assert watch.lap() == 1.0
