"""Whole runs: what is in the folder afterwards, in trackers, and that it is TRL's training and no other."""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sft.runs import make_model, rows_of, settings, write
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from palingenesis.record.reader import load_run
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.data import Quarantine, collator
from palingenesis.sft.model import load_tokenizer
from palingenesis.sft.run import TrainResult, train
from palingenesis.sft.stream import training_stream


def run(tmp_path: Path, **changes: Any) -> tuple[TrainResult, list[dict[str, Any]]]:
    done = train(TrainConfig(**settings(tmp_path, **changes)))
    return done, rows_of(done.folder)


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    done, rows = run(
        tmp_path,
        train__save_steps=3,
        data__eval_dataset=str(tmp_path / "held_out.jsonl"),
        data__eval_every=3,
        logging__run_name="first",
        logging__rl_readiness=True,
    )
    folder = tmp_path / "run"
    assert done.folder == folder and done.steps == 6 and done.main
    there = {path.name for path in folder.iterdir()}
    assert there >= {"run.json", "events.jsonl", "metrics.jsonl", "layers.jsonl", "report.html", "train.log"}
    assert there >= {"model", "checkpoint-3", "checkpoint-6"}
    assert not (folder / "skipped_rows.jsonl").exists()
    record = load_run(folder)
    assert record.verify().ok and record.info["name"] == "first"
    assert [row["train/global_step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert {"train/lr", "train/step_time_s", "train/tokens_per_sec", "train/epoch"} <= set(row)
        assert row["health/output_entropy"] > 0
        assert row["train/epoch"] == pytest.approx(row["train/global_step"] / 15)  # 90 rows, 6 a step
    for name in ("train/eval_s", "train/checkpoint_s"):
        assert [row["train/global_step"] for row in rows if name in row] == [3, 6]
    assert not (folder / "README.md").exists()
    assert "train/mfu" not in rows[-1] or torch.cuda.is_available()
    state = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["loss"] for entry in logged] == [row["train/loss"] for row in rows]
    assert state["best_metric"] == done.eval_loss
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    said = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], return_tensors="pt")
    assert model(**said).logits.isfinite().all()


def test_the_lines_of_a_run(tmp_path: Path) -> None:
    run(tmp_path, data__eval_dataset=str(tmp_path / "held_out.jsonl"), data__eval_every=3)
    lines = (tmp_path / "run" / "train.log").read_text("utf-8").splitlines()
    steps = [line for line in lines if " step=" in line]
    assert len(steps) == 6
    shape = (
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO step=3 loss=\d\.\d{4} lr=\d\.\d\de-\d\d "
        r"grad_norm=\d\.\d{3} tok/s=\d+ dt=\d+\.\d\ds .*eval/loss=\S+ eval/ppl=\S+ eval/gap=\S+"
    )
    assert re.fullmatch(shape, steps[2]), steps[2]
    assert "health/grad_cosine_sim=" in steps[3]
    assert not any("/model.layers" in line for line in steps)
    logger = logging.getLogger("palingenesis")
    assert not any(isinstance(handler, logging.FileHandler) for handler in logger.handlers)


def test_trackers_have_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    _, rows = run(
        tmp_path,
        logging__use_tensorboard=True,
        logging__use_trackio=True,
        logging__project="mine",
        logging__run_name="one",
    )
    (folder,) = (tmp_path / "run" / "tensorboard").iterdir()
    found = EventAccumulator(str(folder))
    found.Reload()
    for name in ("train/loss", "train/lr", "train/grad_norm", "health/token_efficiency", "health/verdict"):
        events = found.Scalars(name)
        assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]
        assert [event.value for event in events] == pytest.approx([row[name] for row in rows], rel=1e-6)
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as base:
        stored = [json.loads(text) for (text,) in base.execute("select metrics from metrics order by step")]
    losses = {one["train/global_step"]: one["train/loss"] for one in stored if "train/loss" in one}
    assert losses == {row["train/global_step"]: pytest.approx(row["train/loss"]) for row in rows}


@pytest.mark.parametrize("packing", [False, True])
def test_training_is_trls(tmp_path: Path, packing: bool) -> None:
    """The same rows through TRL's own trainer and loss give the same weights."""
    made = settings(tmp_path, data__packing=packing, train__max_steps=5)
    config = TrainConfig(**made)
    done = train(config)
    tokenizer = load_tokenizer(config)
    stream = training_stream(config, tokenizer, Quarantine(None), world_size=1)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(tmp_path / "theirs"),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            max_steps=5,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=1,
            weight_decay=0.0,
            train_sampling_strategy="sequential",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            max_length=None,
        ),
        train_dataset=stream.dataset,
        processing_class=tokenizer,
        data_collator=collator(tokenizer.pad_token_id, packed=packing),
    )
    trainer.train()
    ours = AutoModelForCausalLM.from_pretrained(done.folder / "model").state_dict()
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, weight in trainer.model.state_dict().items():
        moved = (weight - start[name]).norm()
        assert (ours[name] - weight).norm() <= 1e-3 * moved + 1e-7, name


@pytest.mark.parametrize(
    "changes",
    [
        {"model__lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
        {"model__torch_dtype": "bfloat16"},
        {"train__gradient_checkpointing": True},
        {"train__optimizer": "sgd"},
        {"train__optimizer": "adafactor"},
        {"train__lr_scheduler": "constant", "train__warmup_ratio": 0.0},
        {"train__lr_scheduler": "linear", "train__min_learning_rate": 1e-3},
        {"train__min_learning_rate": 1e-3},
        {"data__num_workers": 2},
        {"train__max_steps": None, "train__epochs": 2, "train__logging_steps": 5},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_options_do_something_and_the_loss_falls(tmp_path: Path, changes: dict[str, Any]) -> None:
    if changes.get("train__logging_steps"):
        changes = changes | {"logging__health_tier2_every": 5, "logging__health_tier3_every": 10}
    if changes.get("train__optimizer") == "sgd":
        changes = changes | {"train__learning_rate": 1.0}
    done, rows = run(tmp_path, **changes)
    steps = 30 if "train__epochs" in changes else 6
    assert done.steps == steps == len(rows)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    least = changes.get("train__min_learning_rate", 0.0)
    if "train__logging_steps" not in changes:
        rates = [row["train/lr"] for row in rows]
        constant = changes.get("train__lr_scheduler") == "constant"
        assert rates[-1] == pytest.approx(1e-2) if constant else least <= rates[-1] < rates[1]
    else:
        assert [row["train/global_step"] for row in rows if "train/epoch" in row] == [*range(5, 31, 5)]
        assert all("train/loss" in row and "train/batch" in row for row in rows)
    if "model__lora" in changes:
        assert (done.folder / "model" / "adapter_config.json").exists()
    if changes.get("model__torch_dtype") == "bfloat16":
        weights = AutoModelForCausalLM.from_pretrained(done.folder / "model", dtype="auto")
        assert weights.dtype == torch.bfloat16


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    make_model(tmp_path / "tied", tied=True)
    made = settings(tmp_path, plugins__dft=True)
    made["model"]["name_or_path"] = str(tmp_path / "tied")
    done = train(TrainConfig(**made))
    model = AutoModelForCausalLM.from_pretrained(done.folder / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_run_with_findings_says_so(tmp_path: Path) -> None:
    """A learning rate that throws the weights about: drift far beyond what fine-tuning does."""
    done, _ = run(tmp_path, train__learning_rate=1e4, train__max_steps=20)
    assert done.verdict != "HEALTHY"


def test_stop_on_ends_a_run_that_is_lost(tmp_path: Path) -> None:
    done, rows = run(
        tmp_path,
        train__learning_rate=1e30,
        train__max_grad_norm=0.0,
        train__max_steps=40,
        logging__stop_on="critical",
    )
    assert done.verdict == "CRITICAL"
    assert len(rows) == done.steps < 20


def test_rows_that_cannot_be_used_are_kept_with_the_reason(tmp_path: Path) -> None:
    """And told of in the log."""
    made = settings(tmp_path)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"messages": [{"role": "user", "content": "hello"}]}\n{"mess')
    train(TrainConfig(**made))
    skipped = [json.loads(line) for line in (tmp_path / "run" / "skipped_rows.jsonl").open(encoding="utf-8")]
    assert [row["line"] for row in skipped] == [91, 92]
    assert skipped[1]["kind"] == "broken_json"
    log = (tmp_path / "run" / "train.log").read_text("utf-8")
    assert "2 rows skipped (1 role_order, 1 broken_json)" in log and "skipped_rows.jsonl" in log


def test_sigterm_ends_a_run_with_its_record_closed(tmp_path: Path) -> None:
    made = settings(tmp_path, train__max_steps=10_000)
    path = write(tmp_path, made)
    process = subprocess.Popen(
        [sys.executable, "-m", "palingenesis", "train", "--config", str(path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step=3 "):
            process.terminate()
            break
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert "--train.resume_from auto goes on" in rest and "Traceback" not in rest
    record = load_run(tmp_path / "run")
    assert record.verdict == "INTERRUPTED" and record.events[-1].event == "run_ended"
    assert record.verify().ok
