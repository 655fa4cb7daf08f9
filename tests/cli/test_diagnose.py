"""``pgs diagnose`` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.preflight.models import agree
from tests.sft.runs import settings, write

from palingenesis.cli import main

ROOT = Path(__file__).parents[2]
SPEC = ["diagnose", "--config", "configs/qwen35_4b/a100_80gb.yaml", "--mode", "pre", "--json"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made = settings(
        tmp_path,
        train__max_steps=40,
        train__learning_rate=1e-3,
        logging__check_every=10,
        logging__health_tier3_every=20,
    )
    agree(tmp_path / "model")
    return write(tmp_path, made)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_the_specs_command_without_the_hub() -> None:
    command = [sys.executable, "-m", "palingenesis", *SPEC]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "Qwen/Qwen3.5-4B" in line and "--model.name_or_path DIR" in line


def test_the_specs_command_with_stand_ins(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    stand_ins = {
        "model.name_or_path": tmp_path / "model",
        "data.dataset": tmp_path / "rows.jsonl",
        "data.dataset_split": "train",
        "data.eval_dataset": tmp_path / "held_out.jsonl",
        "data.eval_split": "train",
        "data.max_seq_length": 64,
        "train.gradient_accumulation_steps": 8,
        "train.output_dir": tmp_path / "run",
    }
    more = [word for name, value in stand_ins.items() for word in (f"--{name}", str(value))]
    code = main([*SPEC, *more])
    found = document(capsys)
    assert found["command"] == "diagnose" and found["exit_code"] == code == 1
    assert "config.few_steps" in [finding["check"] for finding in found["findings"]]
    assert not (tmp_path / "run").exists()


def test_a_sound_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--config", str(config)]) == 0
    told = capsys.readouterr().out
    assert "checked: model, masks and data, tokenizer, memory, configuration" in told
    assert "run: 40 optimizer steps over about 90 rows an epoch" in told
    assert "memory: " in told


def test_options_over_the_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "diagnose",
        "--config",
        str(config),
        "--train.learning-rate",
        "0.5",
        "--json",
        "--mode",
        "full",
    ]
    assert main(command) == 1
    found = document(capsys)
    checks = [finding["check"] for finding in found["findings"]]
    assert "config.learning_rate_high" in checks
    assert found["facts"]["first_steps"]["overfit_losses"]


def test_a_model_and_data_alone(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    assert main(["diagnose", "--model", str(model), "--data", str(data), "--json"]) in (0, 1)
    assert document(capsys)["facts"]["rows"] == 90


def test_a_card_that_is_too_small(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What would make it fit is the business of `pgs profile`.
    monkeypatch.setattr("palingenesis.preflight.diagnose.SEARCH_SECONDS", 0.0)
    assert main(["diagnose", "--config", str(config), "--gpu_memory_gb", "0.2", "--json"]) == 1
    assert "memory.does_not_fit" in [finding["check"] for finding in document(capsys)["findings"]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing was given to look at"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--mode", "post"], "--log_file"),
        (["--mode", "post", "--log_file", "missing"], "there is no missing"),
        (["--mode", "post", "--log_file", "x", "--config", "y"], "no configuration"),
        (["--log_file", "x", "--config", "y"], "belongs to --mode post"),
        (["--mode", "later"], "later"),
        (["--model", "./missing", "--data", "x"], "./missing"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["diagnose", *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.out == ""
    assert "Traceback" not in captured.err


def test_two_cards_are_one_too_many(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["diagnose", "--config", str(config), "--gpu", "a100-80gb", "--gpu_memory_gb", "80"]
    assert main(command) == 2
    assert "both given" in capsys.readouterr().err
