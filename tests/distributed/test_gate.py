"""A gate opens for all ranks or for none, and nobody waits there for long."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.gate_cases import PATIENCE_S
from tests.distributed.launch import marks
from tests.distributed.launch import seen as seen_in

from palingenesis.signals.gate import MISSES

pytestmark = marks


def seen(case: str) -> list[dict[str, Any]]:
    return seen_in(case, 2, "gates")


def passed(case: str) -> list[list[bool]]:
    return [one["passed"] for one in seen(case)]


def test_all_pass_who_come_together_and_leave_nothing_behind() -> None:
    assert passed("together") == [[True] * 20] * 2
    assert [one["more_keys"] for one in seen("together")] == [0, 0]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("of another mind", [[False] * 3, [False] * 3]),
        ("one leaves", [[True] * 2 + [False] * 3] * 2),
        ("the store is gone", [[False] * 2] * 2),
    ],
)
def test_who_will_not_come_is_not_waited_for(case: str, expected: list[list[bool]]) -> None:
    assert passed(case) == expected
    assert all(one["took"] < PATIENCE_S for one in seen(case))


@pytest.mark.parametrize(
    ("case", "expected"),
    [("one never comes", [[False] * 5, []]), ("one comes no more", [[True] * 2 + [False] * 4, [True] * 2])],
)
def test_who_does_not_come_is_waited_for_twice(case: str, expected: list[list[bool]]) -> None:
    assert passed(case) == expected
    assert MISSES * PATIENCE_S < seen(case)[0]["took"] < (MISSES + 1) * PATIENCE_S


def test_a_late_rank_gets_the_same_answer_and_is_there_the_next_time() -> None:
    assert passed("one is late") == [[True, False, True, True]] * 2
