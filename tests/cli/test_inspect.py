"""``pgs inspect`` as a shell meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cases.build import rows, write_rows
from tests.findings.test_render import problems

from palingenesis.cli import main
from palingenesis.findings.schema import json_schema

MODEL = ["--model", "demo:tiny-chat"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", rows(8))


def test_text_in_a_pipe(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *MODEL, "--data", str(data), "--num_samples", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("⟦Answer ") == 2
    assert "position token" in out
    assert "\x1b" not in out


def test_json_is_one_document(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *MODEL, "--data", str(data), "--index", "3", "--index", "5", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["command"], document["exit_code"], document["findings"]) == ("inspect", 0, [])
    assert [sample["places"][0].split()[-1] for sample in document["facts"]["samples"]] == ["3", "5"]


def test_a_page(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["inspect", *MODEL, "--data", str(data), "--html", str(page)]) == 0
    assert "5 samples, 0 rows left out" in capsys.readouterr().out
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_plain_characters_and_no_table(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *MODEL, "--data", str(data), "--ascii", "--no-table"]) == 0
    out = capsys.readouterr().out
    assert out.isascii() or str(data).isascii() is False
    assert "[[Answer " in out and "position" not in out


def test_options_of_the_configuration(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["inspect", *MODEL, "--data", str(data), "--data.max_seq_length", "40", "--num-samples", "1"])
        == 0
    )
    assert "cut at data.max_seq_length" in capsys.readouterr().out


def test_a_row_that_is_left_out_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = rows(3)
    made[1]["messages"].pop()
    path = write_rows(tmp_path / "rows.jsonl", made)
    assert main(["inspect", *MODEL, "--data", str(path)]) == 1
    assert "line 2 is not trained on" in capsys.readouterr().out
    assert main(["inspect", *MODEL, "--data", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [finding["check"] for finding in document["findings"]] == ["data.role_order"]
    assert problems(document, json_schema()) == []


def test_one_sample_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows(1))
    assert main(["inspect", *MODEL, "--data", str(path), "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.startswith("1 sample, 0 rows left out")


@pytest.mark.parametrize(
    "words",
    [
        [],
        MODEL,
        ["--config", "configs/quickstart.yaml", *MODEL],
        [*MODEL, "--data", "missing.jsonl"],
        [*MODEL, "--data", "demo:chatterbot", "--index", "1000000"],
        [*MODEL, "--data", "demo:chatterbot", "--data.no_such", "1"],
        [*MODEL, "--data", "demo:chatterbot", "--num_samples", "0"],
        ["--model", "./nowhere", "--data", "demo:chatterbot"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("pgs: error: ")
