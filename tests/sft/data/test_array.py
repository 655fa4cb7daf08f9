"""Entries of an array in a file: those that the whole of it has, from as little of it as they need."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.sft.data import Source, load_rows
from palingenesis.sft.data import array as arrays
from palingenesis.sft.data.array import begins_array, entries

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "rows.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(VALUES, max_size=6),
    indent=st.sampled_from([None, 0, 2]),
    ascii=st.booleans(),
    window=st.integers(1, 40),
)
def test_they_are_those_of_the_whole(
    values: list[Any], indent: int | None, ascii: bool, window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii)
    path = write(tmp_path_factory.getbasetemp(), text.encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "WINDOW", window)
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            return  # such a file is not UTF-8
        assert list(entries(path)) == values


@pytest.mark.parametrize("window", [1, 3, 7, 2**20])
@pytest.mark.parametrize(
    ("text", "read", "told"),
    [
        ('[{"a": 1}, {"b": 2', 1, "entry 2 is broken, at character 19: expecting ',' delimiter"),
        ('[{"a": 1}, {"b": ', 1, "entry 2 is broken, at character 18: expecting value"),
        ('[{"a": 1} {"b": 2}]', 1, "entry 1 is broken, at character 11: a comma or the end of the array"),
        ('[{"a": 1}, {"b" 2}, {"c": 3}]', 1, "entry 2 is broken, at character 17: expecting ':' delimiter"),
        ('[{"a": 1}, ', 1, "entry 2 is broken, at character 12: expecting value"),
        ('[{"a": 1}', 1, "entry 1 is broken, at character 10: it ends"),
        ('[{"a": 1},]', 1, "entry 2 is broken, at character 11: expecting value"),
        ('[{"a": "x', 0, "entry 1 is broken, at character 8: unterminated string"),
        ('[{"a": 1}]\n[]', 1, "something follows the array, at character 12"),
        ("[", 0, "entry 1 is broken, at character 2: expecting value"),
        ('{"a": [1]}', 0, "an array of objects is needed"),
    ],
)
def test_what_is_broken_is_told_with_its_place(
    text: str, read: int, told: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "WINDOW", window)
    found = entries(write(tmp_path, text))
    for _ in range(read):
        next(found)
    with pytest.raises(ValueError, match="^" + told.replace("[", r"\[")):
        list(found)


def test_numbers_at_the_end_of_a_window_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "WINDOW", 1)
    path = write(tmp_path, "[12345, -1.5e10, true ,NaN]")
    first, second, third, fourth = entries(path)
    assert (first, second, third) == (12345, -1.5e10, True) and fourth != fourth


def test_an_array_by_its_first_character(tmp_path: Path) -> None:
    for text, so in (("\ufeff\n [1]", True), ('{"a": []}', False), ("", False), ("  ", False)):
        assert begins_array(write(tmp_path, text)) is so


def test_memory_is_that_of_a_window_whatever_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    entry = json.dumps({"text": "naïve 東京 " * 100})
    with path.open("w") as file:
        file.write("[" + entry)
        for _ in range(20_000):
            file.write(",\n" + entry)
        file.write("]")
    assert path.stat().st_size > 40 * 2**20
    tracemalloc.start()
    count = sum(1 for _ in load_rows(Source(str(path))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_001
    assert peak < 8 * 2**20


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    with path.open("w") as file:
        file.write('[{"text": "one"},\n{"text": "two"},\n')
        file.truncate(200 * 2**20)  # a hole: zeros, which are no JSON
    found = load_rows(Source(str(path)))
    assert [next(found).data, next(found).data] == [{"text": "one"}, {"text": "two"}]
