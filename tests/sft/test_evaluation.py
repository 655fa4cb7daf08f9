"""Evaluation against the mean over tokens, a row at a time, on one process and on two."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from palingenesis.sft.data import collator
from palingenesis.sft.evaluation import Evaluation
from palingenesis.sft.head import read_head_inside

VOCABULARY = 32


def make() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            attention_dropout=0.5,  # which an evaluation must not have
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    read_head_inside(model, chunks=2)
    return model


def rows(count: int, seed: int = 0, *, bearing: bool = True) -> list[dict[str, list[int]]]:
    """Rows of three to nine tokens, of which one to six bear loss, or none."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(1, VOCABULARY, (3 + (5 * number + seed) % 7,), generator=random).tolist()
        bears = 1 + number % min(6, len(ids) - 1) if bearing else 0
        made.append({"input_ids": ids, "labels": [-100] * (len(ids) - bears) + ids[len(ids) - bears :]})
    return made


def exact(model: Any, *sources: list[dict[str, list[int]]]) -> float:
    """Σ CE / Σ tokens, from whole logits, one row at a time and without a batch."""
    total, tokens = 0.0, 0
    model.eval()
    with torch.no_grad():
        for row in (row for source in sources for row in source):
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].double().log_softmax(-1)
            for place, label in enumerate(row["labels"][1:]):
                if label != -100:
                    total, tokens = total - float(logits[place, label]), tokens + 1
    model.train()
    return total / tokens


def evaluate(
    model: Any, sources: Mapping[str, Any], weights: Mapping[str, float], batch_size: int = 2
) -> dict[str, float]:
    return make_evaluation(sources, weights, batch_size).run(model, read, dict)


def make_evaluation(
    sources: Mapping[str, Any], weights: Mapping[str, float] | None = None, batch_size: int = 2
) -> Evaluation:
    return Evaluation(sources, weights or dict.fromkeys(sources, 1.0), collator(0, packed=False), batch_size)


def read(model: Any, batch: Mapping[str, Any]) -> Any:
    return model(**batch, token_statistics=True)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_one_source_is_the_mean_over_its_tokens(batch_size: int) -> None:
    model, held_out = make(), rows(7)
    found = evaluate(model, {"a": held_out}, {"a": 2.0}, batch_size)
    loss = exact(model, held_out)
    assert found == {"loss": pytest.approx(loss, rel=1e-5), "ppl": pytest.approx(math.exp(loss), rel=1e-4)}


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_several_sources_are_weighted_and_told_one_by_one(batch_size: int) -> None:
    model = make()
    sources = {"a": rows(7), "b": rows(4, seed=3), "c": rows(1, seed=5)}
    found = evaluate(model, sources, {"a": 3.0, "b": 0.5, "c": 1.5}, batch_size)
    a, b, c = (exact(model, source) for source in sources.values())
    assert len({round(one, 3) for one in (a, b, c)}) == 3
    loss = (3 * a + 0.5 * b + 1.5 * c) / 5
    expected = {"a/loss": a, "b/loss": b, "c/loss": c, "loss": loss}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert found.keys() == {*expected, "ppl"}


@pytest.mark.parametrize("empty", ["no rows", "no token that bears loss"])
def test_a_source_without_a_loss_is_left_out_and_named_once(
    empty: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    sources = {
        "a": rows(5),
        "none": rows(0 if empty == "no rows" else 3, bearing=False),
        "b": rows(3, seed=3),
    }
    evaluation = make_evaluation(sources, {"a": 3.0, "none": 100.0, "b": 1.0})
    monkeypatch.setattr(logging.getLogger("palingenesis"), "propagate", True)
    first = evaluation.run(model, read, dict)
    expected = (3 * exact(model, sources["a"]) + exact(model, sources["b"])) / 4
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    assert first.keys() == {"loss", "ppl", "a/loss", "b/loss"}
    assert evaluation.run(model, read, dict) == first
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "none" in told.getMessage() and "eval/loss" in told.getMessage()


def test_all_sources_without_a_loss_have_no_number() -> None:
    found = evaluate(make(), {"a": rows(2, bearing=False)}, {"a": 1.0})
    assert found.keys() == {"loss", "ppl"} and all(map(math.isnan, found.values()))


def test_a_model_that_broke_is_told_as_broken() -> None:
    model, bad = make(), rows(6)
    poisoned = bad[-1]["input_ids"][0]
    others = [token for token in range(1, 9) if token != poisoned][:3]
    good = [{"input_ids": others, "labels": others}]
    with torch.no_grad():
        model.model.embed_tokens.weight[poisoned] = math.nan
    found = evaluate(model, {"bad": bad, "good": good}, {"bad": 1.0, "good": 1.0})
    assert math.isnan(found["bad/loss"]) and math.isnan(found["loss"]) and math.isnan(found["ppl"])
    assert math.isfinite(found["good/loss"])


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = make().train(training)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    once = evaluate(model, {"a": rows(4)}, {"a": 1.0})
    assert model.training == training and model.model.training == training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert evaluate(model, {"a": rows(4)}, {"a": 1.0}) == once  # no dropout


def test_batches_are_prepared() -> None:
    seen: list[tuple[int, ...]] = []

    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(tuple(batch["input_ids"].shape))
        return batch

    make_evaluation({"a": rows(5)}, batch_size=2).run(make(), read, prepare)
    assert [shape[0] for shape in seen] == [2, 2, 1]


RANKS = """
import json, sys
import torch, torch.distributed as dist
from tests.sft.test_evaluation import make, make_evaluation, read, rows

rank, world = int(sys.argv[1]), int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=world)
sources = {"a": rows(5), "b": rows(1, seed=3), "none": rows(2, bearing=False)}
calls = 0
def counted(model, batch):
    global calls
    calls += 1
    return read(model, batch)
found = make_evaluation(sources, {"a": 1.0, "b": 2.0, "none": 4.0}).run(make(), counted, dict)
print(json.dumps({"found": found, "calls": calls}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_share_the_rows_and_all_have_the_sum(tmp_path: Path, world: int) -> None:
    """Each row once, though some ranks have fewer batches than others, or none at all."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "meet"), str(world)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = [json.loads(rank.communicate(timeout=180)[0].splitlines()[-1]) for rank in ranks]
    model = make()
    a, b = exact(model, rows(5)), exact(model, rows(1, seed=3))
    for one in told:
        expected = {"a/loss": a, "b/loss": b, "loss": (a + 2 * b) / 3, "ppl": math.exp((a + 2 * b) / 3)}
        assert one["found"] == pytest.approx(expected, rel=1e-5)
    # A sharded model would hang otherwise.
    assert len({one["calls"] for one in told}) == 1
