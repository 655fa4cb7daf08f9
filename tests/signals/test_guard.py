"""The fold of every step's norms against a loop in plain Python."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.signals.guard import ROWS, Guard

VALUES = st.one_of(
    st.sampled_from([0.0, math.nan, math.inf, 5e-324, 1e-300, 1e300, 1.0, 1.0]),
    st.floats(min_value=0.0, allow_nan=False, allow_infinity=False),
)


def folded(steps: list[int], norms: list[list[float]]) -> list[list[float]]:
    """What the guard should know, one column a norm."""
    columns = []
    for series in zip(*norms, strict=True):
        peak = peak_step = first = present = last = 0.0
        for step, norm in zip(steps, series, strict=True):
            if math.isfinite(norm) and norm > peak:
                peak, peak_step = norm, step
            if not math.isfinite(norm) and not first:
                first = step
            if norm != 0:
                present, last = present + 1, step
        columns.append([peak, peak_step, first, present, last])
    return [list(row) for row in zip(*columns, strict=True)]


@st.composite
def intervals(draw: st.DrawFn) -> tuple[int, list[list[list[float]]]]:
    size = draw(st.integers(1, 4))
    norms = st.lists(st.lists(VALUES, min_size=size, max_size=size), min_size=1, max_size=12)
    return draw(st.integers(1, 10**6)), draw(st.lists(norms, min_size=1, max_size=3))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(intervals())
def test_like_a_loop_over_the_steps(case: tuple[int, list[list[list[float]]]]) -> None:
    step, checks = case
    guard = Guard(len(checks[0][0]), torch.zeros(1, dtype=torch.float64))
    for norms in checks:
        steps = list(range(step, step + len(norms)))
        for at, values in zip(steps, norms, strict=True):
            guard.fold(at, torch.tensor(values, dtype=torch.float64))
        assert guard.values.tolist() == folded(steps, norms)
        assert guard.steps == len(norms)
        guard.reset()
        assert guard.steps == 0
        assert not guard.values.any()
        step += len(norms)


def test_rows_are_what_they_are_called() -> None:
    guard = Guard(1, torch.zeros(1, dtype=torch.float64))
    for step, norm in enumerate([2.0, 7.0, 7.0, math.inf, 0.0, math.nan], start=11):
        guard.fold(step, torch.tensor([norm], dtype=torch.float64))
    found = dict(zip(ROWS, guard.values.flatten().tolist(), strict=True))
    assert found == {
        "peak": 7.0,
        "peak_step": 12.0,
        "first_nonfinite": 14.0,
        "present_steps": 5.0,
        "last_present": 16.0,
    }


def test_the_norms_are_not_kept() -> None:
    """They are overwritten by the next step's."""
    guard, norms = Guard(1, torch.zeros(1)), torch.ones(1)
    guard.fold(1, norms)
    norms.fill_(9.0)
    assert guard.values[0].item() == 1.0
