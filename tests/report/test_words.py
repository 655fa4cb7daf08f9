"""Text that cannot act, and numbers that read well."""

from __future__ import annotations

import math

import pytest

from palingenesis.report.words import count, duration, moment, number, plain, sentence, tail, times, visible


def test_characters_that_act_are_shown_as_escapes() -> None:
    assert visible("\x1b[31m\r\n\t") == "\\x1b[31m\\r\\n\\t"
    assert visible("a\u202eb") == "a\\u202eb"
    assert visible("half \udc80") == "half \\udc80"
    visible("half \udc80").encode("utf-8")
    assert visible("日本語 λ é") == "日本語 λ é"


@pytest.mark.parametrize("limit", range(1, 12))
def test_a_shortened_name_keeps_both_ends_and_the_limit(limit: int) -> None:
    assert len(visible("abcdefghijkl", limit)) == limit
    assert visible("abcdefghijkl", 7) == "abc…jkl"
    assert tail("abcdefghijkl", 5) == "…ijkl"
    assert visible("short", 12) == tail("short", 12) == "short"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (1.25849, "1.258"),
        (1234567.0, "1.235e6"),
        (123456.7, "123,457"),
        (-0.2, "−0.2"),
        (1e-7, "1e−7"),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        ("NaN", "NaN"),
    ],
)
def test_numbers(value: object, shown: str) -> None:
    assert number(value) == shown


def test_departures_in_words() -> None:
    assert times(math.log10(340)) == "340 times"
    assert times(-math.log10(340)) == "1/340 of"
    assert times(30) == "10^30 times"
    assert times(math.inf) == "a non-finite multiple of"


def test_counts_times_and_durations() -> None:
    assert count(1, "layer") == "1 layer"
    assert count(1200, "layer") == "1,200 layers"
    assert moment("2026-01-02T03:04:05.678+00:00") == "2026-01-02 03:04:05 UTC"
    assert moment("<b>") == "<b>"
    assert duration("2026-01-02T03:04:05Z", "2026-01-03T04:05:05Z") == "1 day 1 hour"
    assert duration("2026-01-02T03:04:05Z", None) is None
    assert plain(("a ", "b\n")) == "a b\\n"


def test_a_sentence_that_begins_with_a_name_keeps_it() -> None:
    assert sentence("lm_head has drifted") == "lm_head has drifted."
    assert sentence("model.norm: gone") == "model.norm: gone."
    assert sentence("the loss rose") == "The loss rose."
