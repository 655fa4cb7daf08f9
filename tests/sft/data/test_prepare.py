"""From files to data sets: every row is used or told of, and the numbers add up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.sft.data.chats import FAMILIES
from tests.test_house import run as run_program

from palingenesis.errors import ConfigError
from palingenesis.sft.data import MaskOptions, Prepared, Quarantine, Source, mix, pack, prepare


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, lines: list[Any]) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", "utf-8")
    return str(path)


def run(
    source: Source, folder: Path, *, limit: int | None = None, **options: Any
) -> tuple[Prepared, Quarantine]:
    tokenizer = FAMILIES["chatml"].tokenizer()
    with Quarantine(folder) as quarantine:
        return prepare(source, tokenizer, quarantine, options=MaskOptions(**options), limit=limit), quarantine


def skipped(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "skipped_rows.jsonl").read_text("utf-8").splitlines()]


def test_bad_rows_are_counted_kept_and_named(tmp_path: Path) -> None:
    lines = [
        chat("One?", "Two."),
        '{"messages": [',
        {"chat": "Hi"},
        {"messages": chat("One?", "Two.")["messages"][::-1]},
        chat("One?", "  "),
        chat("One?", "Two.<|im_end|>"),
        chat("a " * 200, "Two."),
        chat("Three?", "Four."),
    ]
    path = write(tmp_path / "rows.jsonl", lines)
    prepared, quarantine = run(Source(path), tmp_path / "out", max_length=60)

    assert prepared.dataset["row"][:] == [1, 8]
    kinds = {
        2: "broken_json",
        3: "missing_field",
        4: "role_order",
        5: "empty_answer",
        6: "control_token",
        7: "nothing_to_train",
    }
    entries = skipped(tmp_path / "out")
    assert {entry["line"]: entry["kind"] for entry in entries} == kinds
    assert all(entry["file"] == path and entry["source"] == "rows" and entry["reason"] for entry in entries)
    assert entries[0]["row"] == '{"messages": [' and entries[1]["row"] == {"chat": "Hi"}
    assert quarantine.counts == Counter({("rows", kind): 1 for kind in kinds.values()})
    told = quarantine.summary()
    assert told.startswith("6 rows skipped (1 broken_json, ") and f"{path} line 2: not JSON" in told
    assert "\n" not in told
    account = prepared.account
    assert (account.read, account.used, account.skipped, account.samples) == (8, 2, 6, 2)


def test_the_account_adds_up(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [chat("One?", "Two. " * count) for count in (1, 5, 30)])
    prepared, quarantine = run(Source(path), tmp_path, max_length=40)
    rows = list(prepared.dataset)
    account = prepared.account
    assert account.tokens == sum(len(row["input_ids"]) for row in rows)
    assert account.loss_tokens == sum(label != -100 for row in rows for label in row["labels"])
    assert account.cut == 1
    assert "1 rows cut at data.max_seq_length" in account.told()
    assert quarantine.summary() == "no row was skipped"
    assert not (tmp_path / "skipped_rows.jsonl").exists()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "holds no row"),
        ([{"chat": 1}] * 3 + ["{"], r"none of the 4 rows .* mostly because \(.*line 1: the row has no field"),
    ],
)
def test_nothing_left_is_an_error(lines: list[Any], told: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", lines)
    with pytest.raises(ConfigError, match=told) as caught:
        run(Source(path), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not lines or len(skipped(tmp_path / "out")) == 4


def test_a_second_run_begins_its_list_of_skipped_rows_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["{", chat("One?", "Two.")])
    for _ in range(2):
        run(Source(path), tmp_path)
        assert len(skipped(tmp_path)) == 1
    run(Source(write(tmp_path / "good.jsonl", [chat("One?", "Two.")])), tmp_path)
    assert not (tmp_path / "skipped_rows.jsonl").exists()


def test_rows_that_json_cannot_hold_are_kept_readable(tmp_path: Path) -> None:
    import datetime

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"when": datetime.date(2020, 1, 2), "score": float("nan"), "raw": b"\x00", "messages": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError):
        run(Source(str(tmp_path / "rows.parquet")), tmp_path)
    (entry,) = skipped(tmp_path)
    assert entry["row"] == {
        "when": "datetime.date(2020, 1, 2)",
        "score": "nan",
        "raw": "b'\\x00'",
        "messages": None,
    }


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["{", chat("One?", "Two.")])
    quarantine = Quarantine(None)
    prepare(Source(path), FAMILIES["chatml"].tokenizer(), quarantine, options=MaskOptions())
    assert len(quarantine) == 1 and sorted(tmp_path.iterdir()) == [Path(path)]


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ["{", *[chat("One?", "Two.")] * 5])
    prepared, _ = run(Source(path), tmp_path, limit=2)
    assert (prepared.account.used, prepared.account.read) == (2, 3)


def test_plain_text(tmp_path: Path) -> None:
    path = write(tmp_path / "text.jsonl", [{"text": "The answer. " * 30}, {"text": "Short."}])
    prepared, _ = run(Source(path, mode="pretrain"), tmp_path, max_length=32)
    account = prepared.account
    assert account.used == 2 and account.samples > 2 and account.cut == 0
    assert account.loss_tokens == account.tokens - account.samples


def test_sources_are_mixed_by_weight_and_can_be_packed(tmp_path: Path) -> None:
    parts = []
    for name, count in (("a", 30), ("b", 10)):
        path = write(
            tmp_path / f"{name}.jsonl", [chat(f"{name} {number}?", "Yes.") for number in range(count)]
        )
        parts.append(run(Source(path), tmp_path)[0])
    mixed = mix(parts, [1, 3], seed=5)

    assert Counter(mixed["source"]) == {"a": 10, "b": 30}
    assert Counter(row["row"] for row in mixed if row["source"] == "b") == dict.fromkeys(range(1, 11), 3)
    again = mix(parts, [1, 3], seed=5)
    assert mixed["input_ids"][:] == again["input_ids"][:]
    longest = max(len(ids) for ids in mixed["input_ids"])
    assert sum(sum(row["seq_lengths"]) for row in pack(mixed, 3 * longest)) == sum(
        map(len, mixed["input_ids"])
    )


def test_many_rows_span_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [chat(f"{number}?", "Yes.") for number in range(2100)])
    prepared, _ = run(Source(path), tmp_path)
    assert prepared.dataset["row"][:] == list(range(1, 2101))


def test_looking_at_the_module_imports_nothing_heavy() -> None:
    run_program(
        "import palingenesis.sft.data",
        forbid=("torch", "transformers", "datasets", "trl", "pyarrow", "numpy"),
    )
