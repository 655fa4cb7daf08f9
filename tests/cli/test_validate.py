"""``pgs validate`` as a shell meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cases.build import rows, write_rows

from palingenesis.cli import main

MODEL = ["--model", "demo:tiny-chat"]


def test_healthy_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows(8))
    assert main(["validate", *MODEL, "--data", str(path)]) == 0
    captured = capsys.readouterr()
    assert "training: 8 of 8 rows used, 8 samples" in captured.out
    assert "loss share" in captured.out and "validate: nothing found" in captured.out
    assert "rows" not in captured.err  # no bar where there is no terminal


def test_a_fault_is_named_with_its_line_and_its_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = rows(8)
    made[4]["messages"][1]["weight"] = 0
    path = write_rows(tmp_path / "rows.jsonl", made)
    assert main(["validate", *MODEL, "--data", str(path)]) == 1
    out = capsys.readouterr().out
    assert "WARNING masking.no_loss_tokens" in out
    assert "lines 5" in out and "fix: " in out


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*rows(8), "{"])
    assert main(["validate", *MODEL, "--data", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "validate" and document["exit_code"] == 1
    assert [finding["check"] for finding in document["findings"]] == ["data.broken_json"]
    assert document["facts"]["train"]["rows"] == 9


def test_how_many_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows(300))
    for words, count in (([], 200), (["--num-samples", "7"], 7), (["--all"], 300)):
        assert main(["validate", *MODEL, "--data", str(path), *words]) == 0
        assert f"{count} of {count} rows used" in capsys.readouterr().out


def test_with_a_configuration_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "configs/quickstart.yaml", "--data.max_seq_length", "1024", "--num_samples", "20"]
    assert main(["validate", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["facts"]["train"]["rows"] == 20
    assert document["facts"]["eval"]["rows"] > 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--data", "demo:chatterbot"],
        [*MODEL, "--data", "missing.jsonl"],
        [*MODEL, "--data", "tests"],
        [*MODEL, "--data", "demo:chatterbot", "--num_samples", "0"],
        ["--model", "./nowhere", "--data", "demo:chatterbot"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("pgs: error: ")
