"""Strict JSON, one spelling a line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from palingenesis.record.format import canonical, decode, encodable, number


def strict(text: bytes) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


def test_non_finite_floats_are_words_at_any_depth() -> None:
    value = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": 1.5}
    assert strict(canonical(value)) == {"a": "NaN", "b": ["Infinity", {"c": "-Infinity"}], "d": 1.5}


def test_the_canonical_line_has_no_blanks_and_keeps_unicode() -> None:
    assert canonical({"layer": "σ блок", "n": [1, 2]}) == '{"layer":"σ блок","n":[1,2]}'.encode()


def test_numpy_values_paths_and_sets_become_plain_values() -> None:
    value = {
        "f": np.float32(0.5),
        "i": np.int64(3),
        "a": np.array([1.0, np.nan]),
        "p": Path("x"),
        "s": {2, 1},
    }
    assert strict(canonical(value)) == {"f": 0.5, "i": 3, "a": [1.0, "NaN"], "p": "x", "s": [1, 2]}
    assert encodable(np.bool_(True)) is True


def test_line_breaks_and_lone_surrogates_stay_inside_one_line() -> None:
    text = "a\nb\r\u2028c\udce9"
    line = canonical({"message": text})
    assert b"\n" not in line
    assert decode(line) == {"message": text}


def test_bare_nan_is_understood_when_reading() -> None:
    assert math.isnan(decode(b'{"x": NaN}')["x"])


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000, b'{"x": ' + b"9" * 5000 + b"}"])
def test_anything_else_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


def test_a_number_is_a_float_or_nan() -> None:
    assert number("Infinity") == math.inf
    assert number(10**400) == math.inf
    assert number(True) == 1.0
    assert all(math.isnan(number(value)) for value in ("NaN", "text", None, [1], {}))
