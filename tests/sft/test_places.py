"""Source and row of every sample of a step: against what the trainer was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard  # type: ignore[import-untyped]
from safetensors.torch import load_file
from tests.sft.runs import make_rows, rows_of, settings
from torch.utils.data import BatchSampler, SequentialSampler

from palingenesis.config import MonitorConfig
from palingenesis.record.reader import load_run
from palingenesis.record.spikes import Spike, read_spikes
from palingenesis.sft import run as sft_run
from palingenesis.sft.builtin import build_tokenizer
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.data import IGNORED, Quarantine
from palingenesis.sft.run import train
from palingenesis.sft.sample_order import SampleOrder
from palingenesis.sft.stream import Stream, training_stream
from palingenesis.sft.trainer import FineTuner

FAULT = 10


def configured(folder: Path, **changes: Any) -> TrainConfig:
    made = settings(folder, train__max_steps=12, logging__check_every=3, **changes)
    return TrainConfig(**made)


def answers(folder: Path, name: str = "rows.jsonl") -> list[str]:
    lines = (folder / name).read_text("utf-8").splitlines()
    return [json.loads(line)["messages"][1]["content"] for line in lines]


def only(folder: Path) -> Spike:
    (found,) = read_spikes(folder)
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_tells_source_and_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool) -> None:
    trained: list[list[int]] = []
    compute = FineTuner.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, model, inputs, *args, **kwargs)
        if self.state.global_step + 1 != FAULT:
            return loss
        mask = inputs.get("attention_mask")
        trained.extend(
            inputs["input_ids"][i][slice(None) if mask is None else mask[i] > 0].tolist()
            for i in range(len(inputs["input_ids"]))
        )
        return loss * float("nan")

    monkeypatch.setattr(FineTuner, "compute_loss", compute_loss)
    config = configured(tmp_path, data__packing=packing)
    train(config)
    run, spike, tokenizer = tmp_path / "run", only(tmp_path / "run"), build_tokenizer("demo:tiny-chat")
    assert (spike.step, spike.event, spike.notes) == (FAULT, "nonfinite", ())
    given = answers(tmp_path)
    for sample in spike.samples:
        assert sample.source == "rows" and sample.row is not None and sample.text is not None
        assert f"assistant\n{given[sample.row - 1]}<|end|>" in sample.text
    assert len(spike.samples) > 6 if packing else len(spike.samples) == 6
    texts = [sample.text or "" for sample in spike.samples]
    assert "".join(texts) == "".join(tokenizer.decode(row) for row in trained)
    # The fingerprint names the same step's samples, counted by the trainer.
    (metrics,) = [row for row in rows_of(run) if row["train/global_step"] == FAULT]
    assert spike.batch == metrics["train/batch"]
    # And everything that it was told.
    training = load_run(run).training
    assert (training["by"], training["packing"], training["total_steps"]) == ("pgs train", packing, 12)
    assert training["options"] == json.loads(json.dumps(config.flat()))


def stream_of(config: TrainConfig, folder: Path) -> Stream:
    with Quarantine(folder) as quarantine:
        return training_stream(config, build_tokenizer("demo:tiny-chat"), quarantine, world_size=2)


@pytest.mark.parametrize("packing", [False, True])
def test_two_processes_take_micro_batches_by_turns_through_all_epochs(tmp_path: Path, packing: bool) -> None:
    settings(tmp_path)
    make_rows(tmp_path / "more.jsonl", 1300, first=1000)
    sources = [
        {"dataset": str(tmp_path / "rows.jsonl"), "weight": 1.0},
        {"dataset": str(tmp_path / "more.jsonl"), "weight": 3.0},
    ]
    changes = {"data__dataset": None, "data__sources": sources, "data__packing": packing}
    steps = 240 if not packing else 110
    config = TrainConfig(**settings(tmp_path, train__max_steps=steps, **changes))
    stream = stream_of(config, tmp_path)
    assert steps > 1.1 * stream.steps_per_epoch
    batch, accumulation = 3, 2
    given = {name: answers(tmp_path, f"{name}.jsonl") for name in ("rows", "more")}
    decode = build_tokenizer("demo:tiny-chat").decode
    found: dict[int, list[Any]] = {}
    for rank in (0, 1):
        order = SampleOrder(stream, batch=batch, accumulation=accumulation, rank=rank, processes=2)
        plain = BatchSampler(SequentialSampler(range(len(stream.dataset))), batch, drop_last=False)
        shares = list(BatchSamplerShard(plain, num_processes=2, process_index=rank))
        for step in (1, 2, steps // 2, steps - 1, steps):
            told = order([order.key(step, micro) for micro in range(accumulation)])
            for micro, places in enumerate(told):
                assert places
                rows = [stream.dataset[i] for i in shares[(step - 1) * accumulation + micro]]
                ids = [token for row in rows for token in row["input_ids"]]
                assert [token for place in places for token in place.ids or ()] == ids
                for place in places:
                    assert place.source is not None and place.row is not None and place.labels is not None
                    trained = [label for label in place.labels if label != IGNORED]
                    assert decode(trained) == given[place.source][place.row - 1] + "<|end|>"
                found.setdefault(step, []).extend(places)
    assert {place.source for places in found.values() for place in places} == {"rows", "more"}


def test_rows_that_do_not_pack_as_before_are_told_without_a_place(tmp_path: Path) -> None:
    stream = stream_of(TrainConfig(**settings(tmp_path, data__packing=True)), tmp_path)
    order = SampleOrder(stream, batch=3, accumulation=2, rank=0, processes=2)
    assert order([order.key(1, 0)])[0]
    stream.origins.origins.lengths[:] += 1
    assert order([order.key(1, 0)]) == [None]


def test_weights_are_bit_identical_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = FineTuner.compute_loss

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        return loss * 100 if self.state.global_step + 1 == FAULT else loss

    monkeypatch.setattr(FineTuner, "compute_loss", compute_loss)
    finals = []
    for files in (0, 50):
        folder = tmp_path / str(files)
        folder.mkdir()
        options = MonitorConfig(spike_files=files, check_every=3, warmup=2)
        monkeypatch.setattr(sft_run, "monitor_config", lambda given, options=options: options)
        train(configured(folder, data__packing=True, train__learning_rate=1e-4))
        finals.append(load_file(folder / "run" / "model" / "model.safetensors"))
    assert not (tmp_path / "0" / "run" / "spikes").exists()
    assert only(tmp_path / "50" / "run").step == FAULT
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
