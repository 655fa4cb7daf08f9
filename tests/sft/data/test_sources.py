"""Rows from files, folders and hub names, with the line each came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palingenesis.errors import ConfigError
from palingenesis.sft.data import Source, load_rows

ROWS = [{"text": "first"}, {"text": "second"}, {"text": "naïve 東京"}]


def read(path: Path | str, **options: Any) -> list[tuple[str, int, Any]]:
    return [(Path(row.file).name, row.number, row.data) for row in load_rows(Source(str(path), **options))]


def write_lines(path: Path, rows: list[Any] = ROWS, *, prefix: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(prefix + "".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def expected(name: str) -> list[tuple[str, int, Any]]:
    return [(name, number, row) for number, row in enumerate(ROWS, start=1)]


def test_every_kind_of_file(tmp_path: Path) -> None:
    array = tmp_path / "array.json"
    array.write_text("\ufeff" + json.dumps(ROWS, ensure_ascii=False), "utf-8")
    array_by_another_name = tmp_path / "array.jsonl"
    array_by_another_name.write_text(json.dumps(ROWS, indent=2))
    for path in (
        write_lines(tmp_path / "lines.jsonl"),
        write_lines(tmp_path / "bom.jsonl", prefix="\ufeff"),
        write_lines(tmp_path / "lines.json"),
        array,
        array_by_another_name,
        write_parquet(tmp_path / "columns.parquet"),
    ):
        assert read(path) == expected(path.name)


def test_a_broken_line_is_a_row_with_a_problem_and_its_line_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "first"}\n\n{"text": "sec\n[1, 2]\n"\xff"\nnull\n{"text": "last"}')
    found = list(load_rows(Source(str(path))))

    assert [(row.number, row.data) for row in found if row.data] == [
        (1, {"text": "first"}),
        (7, {"text": "last"}),
    ]
    told = {row.number: str(row.problem) for row in found if row.problem}
    assert told.keys() == {3, 4, 5, 6}
    assert told[3].startswith("not JSON: ") and told[5].startswith("not UTF-8: ")
    assert told[4] == "the row is an array; an object is needed"
    assert told[6] == "the row is null; an object is needed"
    assert next(row.raw for row in found if row.number == 3) == '{"text": "sec'


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl")
    write_parquet(tmp_path / "a.parquet")
    write_lines(tmp_path / ".cache" / "c.jsonl")
    (tmp_path / "README.md").write_text("no rows")
    assert read(tmp_path) == expected("a.parquet") + expected("b.jsonl")


def test_files_named_by_split_do_not_leak_into_each_other(tmp_path: Path) -> None:
    write_lines(tmp_path / "train-00000.jsonl", ROWS[:1])
    write_lines(tmp_path / "test.jsonl", ROWS[1:2])
    write_lines(tmp_path / "dev" / "part.jsonl", ROWS[2:])
    assert [row for *_, row in read(tmp_path)] == ROWS[:1]
    assert [row for *_, row in read(tmp_path, split="test")] == ROWS[1:2]
    assert [row for *_, row in read(tmp_path, split="validation")] == ROWS[2:]
    with pytest.raises(ConfigError, match="none is 'holdout'; there is test, train, validation"):
        read(tmp_path, split="holdout")


def test_a_saved_data_set(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert [row for *_, row in read(tmp_path / "saved")] == ROWS


def test_a_hub_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, split: str) -> Any:
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("palingenesis.sft.data.sources.hub_answers", lambda: True)
    assert [row for *_, row in read("someone/chats", split="train_sft")] == ROWS
    assert asked == [("someone/chats", "train_sft")]


def test_a_hub_name_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(name: str, split: str) -> Any:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("palingenesis.sft.data.sources.hub_answers", lambda: True)
    with pytest.raises(
        ConfigError, match=r"'someone/chats' \(split 'train'\) is no local path .*: no network$"
    ):
        load_rows(Source("someone/chats"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: folder / "none.jsonl", "there is no file or folder"),
        (lambda folder: folder / "none", "there is no file or folder"),
        (lambda folder: folder, "holds no file that ends in .jsonl, .json, .parquet"),
        (lambda folder: _written(folder / "rows.csv", "a,b"), "does not end in"),
        (lambda folder: _written(folder / "rows.json", "[1, 2"), "is not JSON"),
        (lambda folder: _written(folder / "rows.json", '[{"a": 1}, 3]4'), "something follows the array"),
        (lambda folder: _written(folder / "rows.parquet", "text"), "is no Parquet file"),
    ],
)
def test_what_cannot_be_read(make: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        list(load_rows(Source(str(make(tmp_path)))))
    assert "\n" not in str(caught.value)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_title() -> None:
    assert Source("data/chats.jsonl").title == "chats"
    assert Source("someone/chats").title == "someone/chats"
    assert Source("someone/chats", name="mine").title == "mine"
