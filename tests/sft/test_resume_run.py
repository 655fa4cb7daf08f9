"""Runs that are killed and go on: the same weights, the same batches, every row once."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.sft.runs import rows_of, settings, write

from palingenesis.errors import ConfigError
from palingenesis.record.reader import load_run
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.run import train

STEPS = 12

# Trains, and kills itself when something is called at a step.
PROGRAM = """
import os, signal, sys
from palingenesis.sft import callbacks
from palingenesis.sft.config import load_config
from palingenesis.sft.run import train

path, kind, method, step = sys.argv[1:]
owner = getattr(callbacks, kind)
before = getattr(owner, method)

def die(self, args, state, control, **kwargs):
    if state.global_step == int(step):
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, args, state, control, **kwargs)

setattr(owner, method, die)
train(load_config(path))
"""


def run_settings(tmp_path: Path, name: str, **changes: Any) -> dict[str, Any]:
    made = settings(
        tmp_path,
        train__max_steps=STEPS,
        train__save_steps=4,
        data__eval_dataset=str(tmp_path / "held_out.jsonl"),
        data__eval_every=5,
        logging__use_tensorboard=True,
        **changes,
    )
    made["train"]["output_dir"] = str(tmp_path / name)
    return made


def killed(tmp_path: Path, made: dict[str, Any], kind: str, method: str, step: int) -> None:
    arguments = [str(write(tmp_path, made)), kind, method, str(step)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def current_rows(run: Path) -> dict[int, dict[str, Any]]:
    """The last row of each step: those before it were of steps that were trained again."""
    return {row["train/global_step"]: row for row in rows_of(run)}


def tensorboard_steps(run: Path, name: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (path for path in (run / "tensorboard").iterdir() if path.is_dir())
    found = EventAccumulator(str(folder))
    found.Reload()
    return [event.step for event in found.Scalars(name)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "step", "from_step"),
    [
        ("RowCallback", "on_step_begin", 7, 5),  # step 7 is done; the newest checkpoint is the best model's
        ("RowCallback", "on_step_begin", 11, 10),
        ("MarkCallback", "on_save", 8, 5),  # a checkpoint whose files are there, but for the last
        ("RowCallback", "on_step_begin", 3, 0),  # before any checkpoint
    ],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, kind: str, method: str, step: int, from_step: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = run_settings(tmp_path, "whole"), run_settings(tmp_path, "broken")
    train(TrainConfig(**whole))
    killed(tmp_path, broken, kind, method, step)
    assert load_run(tmp_path / "broken").verdict == "INTERRUPTED"
    broken["train"]["resume_from"] = "auto"
    done = train(TrainConfig(**broken))

    assert done.steps == STEPS
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

    expected, found = current_rows(tmp_path / "whole"), current_rows(tmp_path / "broken")
    assert list(expected) == sorted(found) == list(range(1, STEPS + 1))
    for at, row in expected.items():
        for name in ("train/batch", "train/loss", "train/lr", "train/tokens_total_all", "train/epoch"):
            assert found[at][name] == row[name], (at, name)
        assert found[at].get("eval/loss") == row.get("eval/loss")
        drift = "health/weight_drift_max"  # from the weights before the first start
        if drift in row:
            assert found[at][drift] == pytest.approx(row[drift], rel=1e-6)
    assert len({row["train/batch"] for row in expected.values()}) == STEPS

    record = load_run(tmp_path / "broken")
    assert record.verify().ok
    (resumed,) = (event for event in record.events if event.event == "run_resumed")
    assert resumed.from_step == from_step
    assert record.metrics["step"].tolist() == list(range(1, STEPS + 1))
    assert tensorboard_steps(tmp_path / "broken", "train/loss") == list(range(1, STEPS + 1))
    if kind == "MarkCallback":
        log = (tmp_path / "broken" / "train.log").read_text("utf-8")
        assert "checkpoint-8" in log and "passed over" in log


def test_an_explicit_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    whole = run_settings(tmp_path, "whole", train__keep_checkpoints=9)
    train(TrainConfig(**whole))
    before = weights(tmp_path / "whole")
    whole["train"]["resume_from"] = str(tmp_path / "whole" / "checkpoint-4")
    train(TrainConfig(**whole))
    after = weights(tmp_path / "whole")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(rows_of(tmp_path / "whole")) == STEPS + STEPS - 4


def test_a_way_that_was_left_is_not_gone_on_with(tmp_path: Path) -> None:
    """From checkpoint 4 again, killed before the next one: the old checkpoints 8 and 12 are no way on."""
    made = run_settings(tmp_path, "run", train__keep_checkpoints=9)
    train(TrainConfig(**made))
    made["train"]["resume_from"] = str(tmp_path / "run" / "checkpoint-4")
    killed(tmp_path, made, "RowCallback", "on_step_begin", 4)
    made["train"]["resume_from"] = "auto"
    train(TrainConfig(**made))
    record = load_run(tmp_path / "run")
    assert [event.from_step for event in record.events if event.event == "run_resumed"] == [4, 4]
    assert "checkpoint-12 is left behind" in (tmp_path / "run" / "train.log").read_text("utf-8")


def test_a_run_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    made = run_settings(tmp_path, "run")
    train(TrainConfig(**made))
    before = weights(tmp_path / "run")
    made["train"]["resume_from"] = "auto"
    done = train(TrainConfig(**made))
    after = weights(tmp_path / "run")
    assert done.steps == STEPS
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(rows_of(tmp_path / "run")) == STEPS


def test_other_data_cannot_be_gone_on_with(tmp_path: Path) -> None:
    made = run_settings(tmp_path, "run")
    train(TrainConfig(**made))
    record = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    made["train"] |= {"resume_from": "auto", "max_steps": 20}
    made["data"]["last_turn_only"] = True
    with pytest.raises(ConfigError, match=r"data\.last_turn_only is not what it was"):
        train(TrainConfig(**made))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == record


def test_rows_that_changed_cannot_be_gone_on_with(tmp_path: Path) -> None:
    made = run_settings(tmp_path, "run")
    train(TrainConfig(**made))
    made["train"] |= {"resume_from": "auto", "max_steps": 20}
    text = (tmp_path / "rows.jsonl").read_text("utf-8")
    (tmp_path / "rows.jsonl").write_text(text + text.splitlines()[0] + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the data, the tokenizer or its chat template are not"):
        train(TrainConfig(**made))


def test_a_longer_run_goes_on_by_the_longer_schedule(tmp_path: Path) -> None:
    made = run_settings(tmp_path, "run")
    train(TrainConfig(**made))
    made["train"] |= {"resume_from": "auto", "max_steps": STEPS + 4}
    done = train(TrainConfig(**made))
    assert done.steps == STEPS + 4
    rows = current_rows(tmp_path / "run")
    assert sorted(rows) == list(range(1, STEPS + 5))
    for step in range(STEPS + 1, STEPS + 5):
        # One step of warm-up; step k uses the rate after k - 1 steps.
        through = (step - 1 - 1) / (STEPS + 4 - 1)
        assert rows[step]["train/lr"] == pytest.approx(1e-2 * (1 + math.cos(math.pi * through)) / 2)


def test_a_resumed_run_has_the_rate_it_is_given_now(tmp_path: Path) -> None:
    made = run_settings(tmp_path, "run", train__keep_checkpoints=9)
    train(TrainConfig(**made))
    before = current_rows(tmp_path / "run")
    made["train"] |= {
        "resume_from": str(tmp_path / "run" / "checkpoint-4"),
        "learning_rate": 1e-4,
        "weight_decay": 0.5,
    }
    train(TrainConfig(**made))
    after = current_rows(tmp_path / "run")
    for step in range(5, STEPS + 1):
        assert after[step]["train/lr"] == pytest.approx(before[step]["train/lr"] / 100)
    state = torch.load(tmp_path / "run" / "checkpoint-12" / "optimizer.pt", weights_only=True)
    assert {group["weight_decay"] for group in state["param_groups"]} == {0.0, 0.5}


def test_shards_are_not_read_as_a_whole(tmp_path: Path) -> None:
    made = run_settings(tmp_path, "run")
    train(TrainConfig(**made))
    (tmp_path / "run" / "checkpoint-12" / "sharded").mkdir()
    made["train"] |= {"resume_from": "auto", "max_steps": STEPS + 1}
    with pytest.raises(ConfigError, match=r"written with parallel\.strategy fsdp2 and this run has ddp"):
        train(TrainConfig(**made))
