"""What changes the estimate, by how much, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.preflight.memory.made import config, llama, made

from palingenesis.errors import ConfigError
from palingenesis.preflight.memory import Estimate, estimate_memory
from palingenesis.preflight.memory.optimizers import BLOCK, make_optimizer, states_of
from palingenesis.preflight.memory.step import made_up_batch
from palingenesis.sft import hub

LAYER = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 352 + 2 * 128
WEIGHTS = 2 * 1024 * 128 + 3 * LAYER + 128


def estimated(described: Any = None, *, world_size: int = 1, **options: Any) -> Estimate:
    return estimate_memory(config(**options), described=described or llama(), world_size=world_size)


def test_weights_gradients_and_states_are_what_arithmetic_says() -> None:
    found = estimated(train__gradient_accumulation_steps=3)
    assert found.parameters == WEIGHTS
    assert found.model == "LlamaForCausalLM"
    parts = found.use.made_of
    # CUDA's allocator rounds each tensor up to 512 bytes, and each has a step counter of its own.
    assert parts["parameters"] == pytest.approx(4 * WEIGHTS, rel=2e-3)
    assert parts["gradients"] == pytest.approx(4 * WEIGHTS, rel=2e-3)
    assert parts["optimizer states"] == pytest.approx(8 * WEIGHTS, rel=1e-2)
    assert sum(parts.values()) == found.use.peak


def test_tied_weights_count_once() -> None:
    assert estimated(llama(tie_word_embeddings=True)).parameters == WEIGHTS - 1024 * 128


def test_a_step_takes_less_with_each_way_to_save() -> None:
    plain = estimated(data__max_seq_length=1024).use.peak
    saving: list[dict[str, Any]] = [
        {"train__gradient_checkpointing": True},
        {"model__torch_dtype": "bfloat16"},
        {"model__lora": {"rank": 4}},
        {"train__optimizer": "sgd"},
        {"data__max_seq_length": 512},
    ]
    for options in saving:
        assert estimated(**{"data__max_seq_length": 1024, **options}).use.peak < plain, options


def test_more_chunks_shrink_the_loss_alone() -> None:
    few, many = (estimated(llama(vocab_size=8192), memory__loss_num_chunks=each).use for each in (1, 16))
    assert many.loss_peak < few.loss_peak
    assert many.by_phase.keys() == few.by_phase.keys()


def test_foreach_adamw_holds_a_copy_of_the_gradients_that_the_loop_does_not() -> None:
    settings = config(data__max_seq_length=16)
    cuda, cpu = (
        estimate_memory(settings, described=llama(), on_cuda=each).use.by_phase for each in (True, False)
    )
    most = {phase.name: cuda[phase] - cpu[phase] for phase in cuda}
    # The loop makes the same of one tensor at a time, the largest of which has a sixth of the weights.
    assert most["OPTIMIZER"] > 0.6 * 4 * WEIGHTS
    assert most["BACKWARD"] < 0.1 * 4 * WEIGHTS


def test_moments_of_a_byte_are_a_byte_but_for_embeddings_and_small_tensors() -> None:
    settings = config(train__optimizer="adamw_8bit")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(llama())
    optimizer = make_optimizer(settings, model, on_cuda=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = sum(state.numel() * state.element_size() for state in states_of(optimizer))
    norms, embedding = (2 * 3 + 1) * 128, 1024 * 128
    rest = WEIGHTS - norms - embedding
    assert found == 8 * (norms + embedding) + 2 * rest + 2 * 4 * rest // BLOCK


def test_the_optimizer_and_its_groups_are_those_of_the_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(llama())
    for name, theirs in (("adamw", "adamw_torch"), ("sgd", "sgd"), ("adafactor", "adafactor")):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), optim=theirs, weight_decay=0.1, use_cpu=True, report_to=[]
        )
        trainer = transformers.Trainer(model=model, args=arguments)
        trainer.create_optimizer()
        ours = make_optimizer(config(train__optimizer=name, train__weight_decay=0.1), model, on_cuda=False)
        assert type(ours) is type(trainer.optimizer)
        for one, other in zip(ours.param_groups, trainer.optimizer.param_groups, strict=True):
            assert {id(each) for each in one["params"]} == {id(each) for each in other["params"]}
            assert one["weight_decay"] == other["weight_decay"]
            assert one.get("fused") == other.get("fused")


@pytest.mark.parametrize("packed", [False, True])
def test_made_up_batches_are_as_the_collator_makes_them(packed: bool) -> None:
    pytest.importorskip("trl")
    from palingenesis.sft.data import collator

    settings = config(data__packing=packed, train__per_device_batch_size=2, data__max_seq_length=32)
    batch = made_up_batch(settings, 100)
    rows = [batch["input_ids"].view(2, 32)[at].tolist() for at in range(2)]
    samples: list[dict[str, Any]] = [{"input_ids": row, "labels": row} for row in rows]
    if packed:
        for sample in samples:
            sample["seq_lengths"] = [8, 8, 8, 8]
    else:
        samples[1] = {name: row[:-1] for name, row in samples[1].items()}
        batch["input_ids"][1, -1] = 0
    theirs = collator(0, packed=packed)(samples)
    assert theirs.keys() == batch.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == batch[name].dtype, name
            assert torch.equal(value, batch[name]), name
        else:
            assert value == batch[name], name


def test_rows_of_unequal_length_and_packed_rows_need_a_mask() -> None:
    long: dict[str, Any] = {"data__max_seq_length": 1024, "model__torch_dtype": "bfloat16"}
    plain = estimated(**long).use.made_of["activations"]
    packed = estimated(**long, data__packing=True).use.made_of["activations"]
    assert packed - plain >= 1024 * 1024


@pytest.mark.parametrize(("described", "refused"), [(None, "no config.json"), ("bert", "BertForMaskedLM")])
def test_what_is_no_model_is_refused(tmp_path: Path, described: str | None, refused: str) -> None:
    if described is not None:
        made(described, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=refused) as raised:
        estimate_memory(config(model__name_or_path=str(tmp_path)))
    assert "\n" not in str(raised.value)


def test_a_model_type_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense", "hidden_size": 8}')
    with pytest.raises(ConfigError, match="nonsense"):
        estimate_memory(config(model__name_or_path=str(tmp_path)))


def test_a_folder_with_nothing_but_a_description_is_enough(tmp_path: Path) -> None:
    described = llama()
    described.save_pretrained(tmp_path)
    found = estimate_memory(config(model__name_or_path=str(tmp_path)))
    assert found.use.peak == estimated(described).use.peak


def test_a_hub_that_is_out_of_reach_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_known", (time.monotonic(), False))
    with pytest.raises(ConfigError, match=r"give a folder that holds its config\.json") as raised:
        estimate_memory(config(model__name_or_path="Qwen/Qwen3-4B"))
    assert "\n" not in str(raised.value)


def test_rows_without_a_longest_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.max_seq_length is null"):
        estimated(data__max_seq_length=None)
    with pytest.raises(ConfigError, match=r"100,000,000 tokens .* up to 16,777,216"):
        estimated(data__max_seq_length=100_000_000)


def test_attention_without_its_package_is_traced_without_masks() -> None:
    options: dict[str, Any] = {"model__torch_dtype": "bfloat16", "train__per_device_batch_size": 2}
    flash = estimated(**options, model__attn_implementation="flash_attention_2").use.peak
    assert flash <= estimated(**options).use.peak
