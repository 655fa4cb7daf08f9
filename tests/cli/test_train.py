"""``pgs train``: what it prints, its exit code, and one line for whatever cannot work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.sft.runs import make_rows, settings, write

from palingenesis.cli import main


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    return settings(tmp_path)


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command line is refused with."""
    assert main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("pgs: error: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0].removeprefix("pgs: error: ")


def test_a_run_from_the_command_line(
    tmp_path: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, made)
    assert main(["train", "--config", str(path), "--train.max-steps", "24"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("HEALTHY: ")
    assert lines[1].startswith("24 steps, loss ")
    assert lines[2] == f"model: {tmp_path / 'run' / 'model'}"
    assert lines[3] == f"report: {tmp_path / 'run' / 'report.html'}"
    assert (tmp_path / "run" / "report.html").is_file()
    assert sum(line.startswith("step=") for line in err.splitlines()) == 24


def test_json_is_one_document(
    tmp_path: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", str(write(tmp_path, made)), "--json"]) == 1  # too short to be judged
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "UNKNOWN" and found["steps"] == 6
    assert found["run"] == str(tmp_path / "run") and found["eval_loss"] is None
    assert found["train_loss"] > 0


def test_a_second_run_into_the_folder_is_refused(
    tmp_path: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, made))
    assert main(["train", "--config", path]) == 1
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    capsys.readouterr()
    told = fails(["--config", path], capsys)
    assert "holds a run" in told and "train.resume_from" in told
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


def no_template(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").unlink()


def empty_rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("")


def other_rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"question": "a", "reply": "b"}\n' * 3)


@pytest.mark.parametrize(
    ("change", "before", "told"),
    [
        ({"model__name_or_path": "./no_such_model"}, None, r"there is no folder './no_such_model'"),
        ({}, no_template, r"no chat template: set model.chat_template"),
        ({}, empty_rows, r"holds no row"),
        ({}, other_rows, r"none of the 3 rows"),
        ({"data__dataset": "./nothing.jsonl"}, None, r"there is no file or folder './nothing.jsonl'"),
        ({"train__learning_rat": 1e-5}, None, r"learning_rate"),
        ({"train__learning_rate": "fast"}, None, r"train.learning_rate"),
        ({"train__resume_from": "./checkpoint-9"}, None, r"there is no folder './checkpoint-9'"),
        ({"parallel__strategy": "fsdp2"}, None, r"torchrun"),
        ({"plugins__dft": True, "plugins__deft": True}, None, r"plugins"),
        ({"model__use_liger_kernel": True}, None, r"use_liger_kernel"),
        ({"train__per_device_batch_size": 1000}, None, r"one batch takes 1000"),
        ({"data__eval_dataset": "./nothing.jsonl"}, None, r"data\.eval_dataset: there is no file"),
        ({"model__lora": {"targets": ["lm_head"]}}, None, r"leave the head out of model\.lora\.targets"),
        ({"train__optimizer": "adamw_8bit"}, None, r"adamw_8bit needs a CUDA device"),
        ({"data__packing": True, "model__attn_implementation": "no_such"}, None, r"no_such"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    before: Any,
    told: str,
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    made = settings(tmp_path, **change)
    if change.get("train__per_device_batch_size"):
        made["train"]["max_steps"] = None
    if before is not None:
        before(tmp_path)
    line = fails(["--config", str(write(tmp_path, made))], capsys)
    assert re.search(told, line), line
    assert not (tmp_path / "run" / "run.json").exists()


def test_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config" in fails([], capsys)
    assert "nothing.yaml" in fails(["--config", str(tmp_path / "nothing.yaml")], capsys)
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {name_or_path: [")
    assert "line" in fails(["--config", str(broken)], capsys)
    broken.write_text("model: {name_or_path: m}\ndata: {dataset: d}\n")
    assert "--no_such" in fails(["--config", str(broken), "--no_such", "3"], capsys)


def test_a_device_that_cannot_compute_in_bf16(
    tmp_path: Path,
    made: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    from palingenesis.sft import model

    made["model"]["torch_dtype"] = "bfloat16"

    def old_device(dtype: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old One")
        before(dtype)

    before = model._require_format
    monkeypatch.setattr(model, "_require_format", old_device)
    told = fails(["--config", str(write(tmp_path, made))], capsys)
    assert "Old One" in told and "model.torch_dtype to float32" in told


@pytest.mark.slow
def test_a_launcher_sees_no_crash(tmp_path: Path, made: dict[str, Any]) -> None:
    made["data"]["dataset"] = str(make_rows(tmp_path / "more.jsonl", 90))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", "-m", "palingenesis", "train", "--config"]
    path = tmp_path / "launched.yaml"
    path.write_text(yaml.safe_dump(made))
    done = subprocess.run(
        [*command, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("report: ") == 1
    assert done.stdout.startswith("UNKNOWN: ")
    # Each line once, although two processes ran.
    assert done.stderr.count("step=3 ") == 1
