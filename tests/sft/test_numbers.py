"""Every number of a run against its definition, computed anew from checkpoints in double precision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sft.runs import rows_of, settings
from transformers import AutoModelForCausalLM

from palingenesis.sft.config import TrainConfig
from palingenesis.sft.data import Quarantine
from palingenesis.sft.model import load_tokenizer
from palingenesis.sft.run import train
from palingenesis.sft.stream import training_stream

OBJECTIVES = ("ce", "deft", "dft", "info_sft", "cadft")


def reference(
    objective: str, model: Any, rows: list[dict[str, Any]]
) -> tuple[torch.Tensor, float, float, int]:
    """Loss of a window (with a graph), mean CE, mean gate, tokens: a row at a time, from whole logits."""
    ces, ps, alphas, samples = [], [], [], []
    for number, row in enumerate(rows):
        ids = torch.tensor(row["input_ids"])
        log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        for place, label in enumerate(row["labels"][1:]):
            if label != -100:
                ces.append(-log_probs[place, label])
                ps.append(float(log_probs[place, label].detach().exp()))
                alphas.append(float((log_probs[place].detach().exp() ** 2).sum()))
                samples.append(number)
    values = [float(ce.detach()) for ce in ces]
    if objective == "ce":
        gates = raw = [1.0] * len(ces)
    elif objective == "deft":
        gates = raw = [p**alpha for p, alpha in zip(ps, alphas, strict=True)]
    elif objective == "dft":
        gates = raw = ps
    elif objective == "info_sft":
        logit = lambda p: math.log(p / (1 - p))  # noqa: E731
        raw = [p * max(0.0, logit(0.93) - logit(p)) for p in ps]
        gates = [w / (sum(raw) / len(raw)) for w in raw]
    else:
        means = {}
        for number in set(samples):
            own = [value for value, of in zip(values, samples, strict=True) if of == number]
            means[number] = sum(own) / len(own)
        mean = sum(means.values()) / len(means)
        std = math.sqrt(sum((one - mean) ** 2 for one in means.values()) / (len(means) - 1))
        weights = {number: math.exp(-max(0.0, (one - mean) / std)) for number, one in means.items()}
        gates = raw = [weights[number] * p for number, p in zip(samples, ps, strict=True)]
    loss = sum(gate * ce for gate, ce in zip(gates, ces, strict=True)) / len(ces)
    return loss, sum(values) / len(values), sum(raw) / len(raw), len(ces)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rows_are_what_the_definitions_say(tmp_path: Path, objective: str) -> None:
    plugins = {} if objective == "ce" else {f"plugins__{objective}": True}
    made = settings(
        tmp_path,
        train__save_steps=1,
        train__keep_checkpoints=100,
        train__max_steps=4,
        train__max_grad_norm=0.5,
        **plugins,
    )
    config = TrainConfig(**made)
    done = train(config)
    assert done.steps == 4
    rows = rows_of(tmp_path / "run")
    assert [row["train/global_step"] for row in rows] == [1, 2, 3, 4]
    stream = training_stream(config, load_tokenizer(config), Quarantine(None), world_size=1)
    assert len({len(row["input_ids"]) for row in stream.dataset}) > 3  # unequal lengths
    counted = 0
    for step, row in enumerate(rows, start=1):
        before = tmp_path / "model" if step == 1 else tmp_path / "run" / f"checkpoint-{step - 1}"
        model = AutoModelForCausalLM.from_pretrained(before, dtype=torch.float64)
        window = [stream.dataset[i] for i in range(6 * (step - 1), 6 * step)]
        loss, ce, gate, tokens = reference(objective, model, window)
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        counted += tokens
        assert row["train/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert row["train/grad_norm_raw"] == pytest.approx(norm, rel=1e-4)
        assert row["train/grad_norm"] == pytest.approx(min(norm, 0.5), rel=1e-4)
        assert row["train/tokens_total"] == row["train/tokens_total_all"] == counted
        assert row["train/ppl"] == pytest.approx(math.exp(ce), rel=1e-5)
        if objective == "ce":
            assert "train/ce_loss" not in row and "train/token_gate" not in row
        else:
            assert row["train/ce_loss"] == pytest.approx(ce, rel=1e-5)
            assert row["train/token_gate"] == pytest.approx(gate, rel=1e-5)


def test_the_last_step_may_have_fewer_micro_batches(tmp_path: Path) -> None:
    made = settings(tmp_path, train__save_steps=1, train__keep_checkpoints=9, train__max_steps=None)
    made["train"] |= {"per_device_batch_size": 4, "gradient_accumulation_steps": 4}
    config = TrainConfig(**made)
    done = train(config)
    stream = training_stream(config, load_tokenizer(config), Quarantine(None), world_size=1)
    assert len(stream.dataset) == 88 and stream.left_out == 2  # five whole steps and a half one
    assert done.steps == stream.steps == 6
    rows = rows_of(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-5", dtype=torch.float64)
    loss, _, _, tokens = reference("ce", model, [stream.dataset[i] for i in range(80, 88)])
    assert rows[5]["train/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert rows[5]["train/tokens_total"] - rows[4]["train/tokens_total"] == tokens


def test_packed_rows_have_the_loss_of_their_documents(tmp_path: Path) -> None:
    config = TrainConfig(**settings(tmp_path, data__packing=True, plugins__cadft=True, train__max_steps=2))
    train(config)
    stream = training_stream(config, load_tokenizer(config), Quarantine(None), world_size=1)
    documents = []
    for packed in [stream.dataset[i] for i in range(6)]:
        start = 0
        for length in packed["seq_lengths"]:
            part = slice(start, start + length)
            documents.append({"input_ids": packed["input_ids"][part], "labels": packed["labels"][part]})
            start += length
    assert len(documents) > 12
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    loss, ce, gate, tokens = reference("cadft", model, documents)
    row = rows_of(tmp_path / "run")[0]
    assert row["train/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert row["train/ce_loss"] == pytest.approx(ce, rel=1e-5)
    assert row["train/token_gate"] == pytest.approx(gate, rel=1e-5)
    assert row["train/tokens_total"] == tokens


@pytest.mark.parametrize("sources", [1, 2])
def test_evaluation_is_over_every_token_once(tmp_path: Path, sources: int) -> None:
    made = settings(
        tmp_path, train__max_steps=3, data__eval_every=2, train__save_steps=1, train__keep_checkpoints=9
    )
    held_out = str(tmp_path / "held_out.jsonl")
    if sources == 1:
        made["data"]["eval_dataset"] = held_out
    else:
        made["data"]["eval_sources"] = [
            {"dataset": held_out, "weight": 3.0, "name": "one"},
            {"dataset": str(tmp_path / "rows.jsonl"), "weight": 1.0, "name": "two"},
        ]
        made["data"]["eval_samples"] = 10
    done = train(TrainConfig(**made))
    rows = {row["train/global_step"]: row for row in rows_of(tmp_path / "run")}
    assert [step for step, row in rows.items() if "eval/loss" in row] == [2, 3]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3", dtype=torch.float64)
    losses = {}
    for name, path, most in (("one", held_out, 99), ("two", str(tmp_path / "rows.jsonl"), 10)):
        config = TrainConfig(**settings(tmp_path, data__dataset=path))
        losses[name] = exact_loss(config, model, most)
    if sources == 1:
        expected = losses["one"]
    else:
        expected = (3 * losses["one"] + losses["two"]) / 4
        assert rows[3]["eval/one/loss"] == pytest.approx(losses["one"], rel=1e-5)
        assert rows[3]["eval/two/loss"] == pytest.approx(losses["two"], rel=1e-5)
    assert rows[3]["eval/loss"] == pytest.approx(expected, rel=1e-5)
    assert rows[3]["eval/ppl"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert rows[3]["eval/gap"] == pytest.approx(rows[3]["eval/loss"] - rows[3]["train/loss"], rel=1e-6)
    assert done.eval_loss == min(rows[2]["eval/loss"], rows[3]["eval/loss"])
    assert done.best_checkpoint is not None and done.best_checkpoint.is_dir()


def exact_loss(config: TrainConfig, model: Any, most: int) -> float:
    from palingenesis.sft.data import MaskOptions, prepare
    from palingenesis.sft.stream import training_sources

    (source,) = training_sources(config)
    options = MaskOptions(max_length=config.data.max_seq_length)
    found = prepare(source, load_tokenizer(config), Quarantine(None), options=options, limit=most)
    with torch.no_grad():
        return reference("ce", model, list(found.dataset))[1]


def test_the_chunked_loss_changes_no_number(tmp_path: Path) -> None:
    rows = {}
    for chunked in (True, False):
        folder = tmp_path / str(chunked)
        made = settings(
            tmp_path, train__output_dir=str(folder), memory__chunked_loss=chunked, plugins__deft=True
        )
        train(TrainConfig(**made))
        rows[chunked] = rows_of(folder)
    for with_chunks, whole in zip(rows[True], rows[False], strict=True):
        for name in ("train/loss", "train/ce_loss", "train/grad_norm_raw"):
            assert with_chunks[name] == pytest.approx(whole[name], rel=1e-5)


def test_a_nan_is_told_as_one(tmp_path: Path) -> None:
    """A run that diverges: the trainer's own filter would log 0.0."""
    made = settings(tmp_path, train__learning_rate=1e30, train__max_grad_norm=0.0)
    done = train(TrainConfig(**made))
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["train/loss"] == "NaN"
    assert done.verdict == "CRITICAL"
