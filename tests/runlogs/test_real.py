"""Logs of real trainers and trackers, against what the trainer itself remembers of its run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palingenesis.runlogs.read import read_log
from palingenesis.runlogs.table import RunLog

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "real_runs.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them in one process: most of the time goes into imports."""
    for package in ("trl", "lightning", "wandb", "trackio"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("runs")
    subprocess.run([sys.executable, str(PROGRAM), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture
def hugging_face(runs: Path) -> Path:
    return runs / "transformers"


@pytest.fixture
def trl(runs: Path) -> Path:
    return runs / "trl"


@pytest.fixture
def lightning(runs: Path) -> Path:
    return runs / "lightning"


def history(folder: Path, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of the trainer's own history."""
    entries: list[dict[str, Any]] = json.loads((folder / "truth.json").read_text())
    rows = [entry for entry in entries if name in entry]
    return [row["step"] for row in rows], [row[name] for row in rows]


_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr",
    "eval_loss": "eval/loss",
    "entropy": "health/output_entropy",
    "mean_token_accuracy": "train/token_accuracy",
}


def check(log: RunLog, folder: Path, names: tuple[str, ...], tolerance: float) -> None:
    for name in names:
        steps, values = history(folder, name)
        column = log.column(_NAMES[name])
        np.testing.assert_allclose(column.value, values, rtol=tolerance, atol=1e-12, err_msg=name)
        np.testing.assert_array_equal(column.step, steps, err_msg=name)
    assert log.restarts == () and log.processes == 1


_ALL = ("loss", "grad_norm", "learning_rate", "eval_loss")


def test_what_transformers_prints(hugging_face: Path) -> None:
    log = read_log(hugging_face / "printed.log")
    assert (log.format, log.step_inferred, log.finished, log.total_steps) == ("transformers", True, True, 24)
    # Printed with four digits; steps are from epochs and the bar.
    check(log, hugging_face, _ALL, 1e-3)


def test_trainer_state(hugging_face: Path) -> None:
    for source in (hugging_face / "out", hugging_face / "out" / "checkpoint-24" / "trainer_state.json"):
        log = read_log(source)
        assert (log.format, log.total_steps, log.finished) == ("trainer_state", 24, True)
        check(log, hugging_face, _ALL, 1e-12)


def test_tensorboard(hugging_face: Path) -> None:
    log = read_log(hugging_face / "tensorboard")
    assert (log.format, log.finished) == ("tensorboard", True) and log.started is not None
    check(log, hugging_face, _ALL, 1e-6)


def test_tensorboard_s_own_reader_agrees(hugging_face: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = (hugging_face / "tensorboard").rglob("events.out.tfevents.*")
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    scalars = events.Scalars("train/loss")
    column = read_log(file).column("train/loss")
    assert [event.step for event in scalars] == column.step.tolist()
    assert [event.value for event in scalars] == column.value.tolist()


def test_wandb_offline(hugging_face: Path) -> None:
    log = read_log(hugging_face / "wandb")
    assert (log.format, log.finished) == ("wandb", True)
    assert log.column("time")
    check(log, hugging_face, _ALL, 1e-12)


def test_trackio(hugging_face: Path) -> None:
    log = read_log(hugging_face / "trackio")
    assert log.format == "trackio" and log.column("time")
    check(log, hugging_face, _ALL, 1e-12)


def test_trl(trl: Path) -> None:
    log = read_log(trl / "printed.log")
    assert (log.format, log.finished, log.total_steps) == ("transformers", True, 16)
    check(log, trl, ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy"), 1e-3)


def test_lightning_csv(lightning: Path) -> None:
    truth = json.loads((lightning / "truth.json").read_text())
    log = read_log(lightning)
    assert log.format == "lightning"
    np.testing.assert_allclose(log.column("train/loss").value, truth["train"], rtol=1e-6)
    np.testing.assert_allclose(log.column("eval/loss").value, truth["val"], rtol=1e-6)
    # Lightning counts steps from 0.
    assert log.column("train/loss").step.tolist() == list(range(18))
