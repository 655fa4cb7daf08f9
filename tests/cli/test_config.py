"""``pgs config``, and ``--section.key value`` on it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from palingenesis.cli import main
from palingenesis.cli.app import app
from palingenesis.sft.config import load_config

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name_or_path: m}\ndata: {dataset: d}\ntrain: {learning_rate: 1e-5}\n")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_ready_made_file_is_accepted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--config", str(path)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == load_config(path).model_dump(mode="json")


def test_what_is_printed_is_a_configuration_again(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--train.seed", "3", "--model.lora", "{rank: 2, targets: [q]}", "--logging.run_name", "12"]
    assert main(["config", "--config", str(path), *arguments]) == 0
    shown = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert main(["config", "--config", str(again)]) == 0
    assert capsys.readouterr().out == shown
    comments = [line for line in shown.splitlines() if line.startswith("#")]
    assert comments == [
        "# 6 options are not at their defaults:",
        "#   model.name_or_path: m (required)",
        "#   model.lora: {rank: 2, alpha: 32.0, targets: [q]} (default: null)",
        "#   data.dataset: d (default: null)",
        "#   train.learning_rate: 1.0e-05 (default: 2.0e-05)",
        "#   train.seed: 3 (default: 42)",
        "#   logging.run_name: '12' (default: null)",
    ]


def test_it_is_plain_text_without_a_terminal(path: Path) -> None:
    command = [sys.executable, "-m", "palingenesis", "config", "--config", str(path)]
    env = {"PATH": "", "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "ascii", "COLUMNS": "20"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "  gradient_accumulation_steps: 16\n" in done.stdout


def test_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--config", str(path), "--json", "--train.epochs=2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"] == str(path)
    assert document["config"]["train"]["epochs"] == 2
    assert document["changed"]["train.epochs"] == {"value": 2, "default": 1}
    assert len(document["changed"]) == 4


def test_the_schema_is_the_one_beside_the_ready_made_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((ROOT / "configs" / "schema.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["--train.per-device-batch-size", "4"], "train.per_device_batch_size", 4),
        (["--train.per_device-batch_size=4"], "train.per_device_batch_size", 4),
        (["--train.output-dir=a-b=c"], "train.output_dir", "a-b=c"),
        (["--train.learning_rate", "3e-4"], "train.learning_rate", 3e-4),
        (["--train.epochs", "2", "--train.epochs", "3"], "train.epochs", 3),
        (["--data.max_seq_length", "null"], "data.max_seq_length", None),
        (["--logging.run_name="], "logging.run_name", None),
        (["--logging.run_name=--a.b"], "logging.run_name", "--a.b"),
        (["--logging.use_wandb", "true"], "logging.use_wandb", True),
    ],
)
def test_any_option_can_be_given(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], option: str, value: object
) -> None:
    for words in ([*arguments, "--config", str(path)], ["--config", str(path), *arguments]):
        assert main(["config", "--json", *words]) == 0
        section, name = option.split(".")
        assert json.loads(capsys.readouterr().out)["config"][section][name] == value


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--train.learning_rat", "1"],
            "there is no option --train.learning_rat; did you mean --train.learning_rate?",
        ),
        (
            ["--train.epochs", "-1"],
            "--train.epochs: expected a whole number (at least 1), got -1; default: 1",
        ),
        (
            ["--train.epochs"],
            "Option --train.epochs needs a value: --train.epochs VALUE. See 'pgs config --help'.",
        ),
        (["--train.epochs", "--train.seed", "1"], "Option --train.epochs needs a value"),
        (["--jsn"], "No such option: --jsn. Did you mean --json? See 'pgs config --help'."),
        (
            ["--learning_rate", "1"],
            "No such option: --learning_rate. Options of the configuration are --section.key",
        ),
        (["-x"], "Got unexpected extra argument (-x)"),
        (["other.yaml"], "Got unexpected extra argument (other.yaml)"),
        (["--plugins.dft", "true", "--plugins.deft", "true"], "plugins.deft and plugins.dft are on together"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exits_2(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["config", "--config", str(path), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("pgs: error: ")
    assert told in captured.err


def test_every_command_with_a_configuration_takes_its_options(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        command.callback.__name__
        for command in app.registered_commands
        if command.callback is not None and "config" in inspect.signature(command.callback).parameters
    ]
    assert {"config", "train"} <= set(commands)
    for command in commands:
        assert main([command, "--config", str(path), "--train.learning_rat", "1"]) == 2
        assert "there is no option --train.learning_rat; did you mean" in capsys.readouterr().err


def test_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 2
    assert capsys.readouterr().err == "pgs: error: Missing option '--config'. See 'pgs config --help'.\n"
    assert main(["config", "--config", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml cannot be read: No such file" in capsys.readouterr().err


def test_it_is_quick_and_imports_no_torch(path: Path) -> None:
    program = """
import sys, time
from palingenesis.cli import main
from palingenesis.cli.app import app
assert main() == 0
heavy = {"torch", "numpy", "rich", "transformers"} & set(sys.modules)
sys.exit(f"{heavy} in {time.process_time()} s" if heavy or time.process_time() > 1.5 else 0)
"""
    command = [sys.executable, "-c", program, "config", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
