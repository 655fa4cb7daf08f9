"""Entropy on every loss path and of every kind of model that ``HealthCallback`` meets in the ``Trainer``."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tests.integrations.looks import (
    LookingTrainer,
    Looks,
    Readings,
    UnshiftedTrainer,
    check_entropy,
    check_weights,
    health,
    monitor_of,
    uneven_trainer,
)
from tests.integrations.test_signals import SMALL, masked_model, translation_model
from tests.integrations.tiny import SENTENCES, VOCABULARY, llama, tokenizer, trainer
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM, Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl import SFTConfig, SFTTrainer

from palingenesis.signals.entropy import NAME
from palingenesis.signals.tokens import EFFICIENCY

pytestmark = pytest.mark.usefixtures("noting")


def lora(model: nn.Module, *targets: str) -> nn.Module:
    chosen = list(targets) or ["q_proj"]
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=2, target_modules=chosen, task_type="CAUSAL_LM"))
    return adapted


def why(callback: Any) -> str:
    """What the monitor says of an entropy that cannot be had."""
    (event,) = [
        event
        for event in monitor_of(callback).events
        if event.event == "signal_unavailable" and NAME in event.message
    ]
    return event.message


# -- TRL ---------------------------------------------------------------------------------------------------


class LookingSFTTrainer(Looks, SFTTrainer):
    pass


def sft(
    folder: Path, callback: Any, *, model: Any = None, kind: Any = LookingSFTTrainer, **options: Any
) -> Any:
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "max_length": 16,
        "disable_tqdm": True,
    }
    texts = [sentence * (1 + i % 2) for i, sentence in enumerate(SENTENCES * 8)]
    peft_config = options.pop("peft_config", None)
    return kind(
        llama(),
        SFTConfig(str(folder), **{**defaults, **options}),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=[callback],
        peft_config=peft_config,
    )


def test_trl_whose_fused_output_has_no_logits(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings)
    made = sft(tmp_path, callback)
    made.train()
    check_entropy(readings, made.steps(2))
    noted = monitor_of(callback)
    assert {kind for _, kind in noted.observed} == {"entropies"}
    assert [one.tokens for one in noted.counted] == [len(found) for found in vars(made)["micro_batches"]]
    check_weights(made, noted.counted, 2)
    assert {one.weight for one in noted.counted} == {"tokens"}
    assert 0.5 < readings.series(EFFICIENCY)[-1] < 1
    logged = [row["entropy"] for row in made.state.log_history if "entropy" in row]
    # TRL's own is the mean of the means of micro-batches.
    np.testing.assert_allclose(readings.series(NAME), logged, rtol=0.05)


def test_trl_with_lora_and_gradient_checkpointing(tmp_path: Path) -> None:
    readings = Readings()
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made = sft(tmp_path, health(readings), peft_config=adapter, gradient_checkpointing=True)
    made.train()
    check_entropy(readings, made.steps(2))


def test_trl_with_packed_sequences(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings)
    made = sft(tmp_path, callback, kind=SFTTrainer, packing=True)
    made.train()
    assert not np.isnan(readings.series(NAME)).any()
    assert {kind for _, kind in monitor_of(callback).observed} == {"entropies"}


def test_trl_with_label_smoothing_has_logits_first(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings)
    made = sft(tmp_path, callback, label_smoothing_factor=0.1)
    made.train()
    check_entropy(readings, made.steps(2))
    assert monitor_of(callback).observed == [(step, "logits") for step in (1, 1, 2, 2, 3, 3, 4, 4)]
    check_weights(made, monitor_of(callback).counted, 2)


# -- other losses without logits ---------------------------------------------------------------------------


class Fused(LlamaForCausalLM):
    """Takes its loss from hidden states and the head's weight, as fused kernels do."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = hidden @ self.lm_head.weight.T * getattr(self.config, "logit_scale", 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        if labels is None:
            return CausalLMOutputWithPast(logits=logits)
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        return CausalLMOutputWithPast(loss=loss)


@pytest.mark.parametrize("of_logits", [{}, {"logit_scale": 3.0, "final_logit_softcapping": 2.0}])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_fused_loss_is_read_from_hidden_states_and_head(
    tmp_path: Path, of_logits: dict[str, float], adapted: bool
) -> None:
    model: Any = Fused(llama().config)
    for name, value in of_logits.items():
        setattr(model.config, name, value)
    nn.init.normal_(model.lm_head.weight)
    readings = Readings()
    callback = health(readings)
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.05}
    made = uneven_trainer(tmp_path, callback, model=lora(model) if adapted else model, **options)
    made.train()
    check_entropy(readings, made.steps(2))
    assert {kind for _, kind in monitor_of(callback).observed} == {"hidden"}
    # It has no use for the number of tokens, so the trainer's loss is made of means.
    assert {one.weight for one in monitor_of(callback).counted} == {1.0}


def test_an_adapted_head_is_not_guessed(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings)
    model = lora(Fused(llama().config), "q_proj", "lm_head")
    uneven_trainer(tmp_path, callback, model=model, max_steps=2).train()
    assert not any(NAME in reading.scalars for reading in readings)
    assert "whose output cannot be told from its weight" in why(callback)


def test_virtual_tokens_are_not_guessed_either(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings)
    prompt = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(llama(), prompt)
    uneven_trainer(tmp_path, callback, model=model, kind=Trainer, max_steps=2).train()
    assert not any(NAME in reading.scalars for reading in readings)
    assert "do not fit labels of shape" in why(callback)


@pytest.mark.parametrize("fused", [False, True])
def test_half_precision(tmp_path: Path, fused: bool) -> None:
    model = Fused(llama().config) if fused else llama()
    nn.init.normal_(model.lm_head.weight)
    readings = Readings()
    made = uneven_trainer(tmp_path, health(readings), model=model, max_steps=3, bf16=True)
    made.train()
    np.testing.assert_allclose(readings.series(NAME), made.steps(), rtol=0.01)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Fused])
def test_a_compiled_model_keeps_its_graphs(tmp_path: Path, kind: type[LlamaForCausalLM]) -> None:
    """Logits come out of it, hidden states do not."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(prepare: Any) -> Any:
        return lambda model, **options: torch.compile(prepare(model, **options), backend=backend)

    config = copy.deepcopy(llama().config)
    config.num_hidden_layers = 1
    counts = []
    readings = Readings()
    callback = health(readings, logging_steps=2)
    for callbacks in ([], [callback]):
        torch._dynamo.reset()
        graphs.clear()
        made = uneven_trainer(tmp_path, *callbacks, model=kind(config), kind=Trainer, max_steps=4)
        made.accelerator.prepare_model = compiled(made.accelerator.prepare_model)
        made.train()
        counts.append(len(graphs))
    torch._dynamo.reset()
    assert counts[0] == counts[1] > 0
    found = {reading.step: reading.scalars[NAME] for reading in readings if NAME in reading.scalars}
    if kind is Fused:
        assert not found
        assert "from inside a compiled model" in why(callback)
    else:
        assert found.keys() == {2, 4}


def test_a_model_compiled_in_place_is_told(tmp_path: Path) -> None:
    model = llama()
    model.compile(backend="eager")
    callback = health(Readings())
    trainer(tmp_path, callback, model=model, max_steps=2).train()
    assert "compiled in place" in why(callback)


# -- other models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [masked_model, translation_model])
def test_labels_that_are_targets_as_they_stand(tmp_path: Path, make: Any) -> None:
    readings = Readings()
    callback = health(readings)
    made = uneven_trainer(tmp_path, callback, kind=UnshiftedTrainer, model=make(), max_steps=3)
    made.train()
    check_entropy(readings, made.steps())
    counts = [len(found) for found in vars(made)["micro_batches"]]
    assert [one.tokens for one in monitor_of(callback).counted] == counts


def test_a_classifier_has_one_label_a_row(tmp_path: Path) -> None:
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **SMALL))
    readings = Readings()
    made = trainer(tmp_path, health(readings), model=model, max_steps=3)
    made.data_collator = lambda batch: {
        "input_ids": torch.tensor([row["input_ids"] for row in batch]),
        "labels": torch.tensor([row["labels"][0] % 3 for row in batch]),
    }
    made.train()
    assert readings.series(EFFICIENCY) == [1.0] * 3
    assert all(0 < value <= math.log(3) + 1e-6 for value in readings.series(NAME))


class Bare(nn.Module):
    """No transformers model: nothing says whether its labels are shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
        logits = self.head(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_model_that_does_not_say_how_labels_are_meant(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings)
    trainer(tmp_path, callback, model=Bare(), max_steps=3).train()
    assert readings.series(EFFICIENCY) == [11 / 12] * 3
    assert {one.weight for one in monitor_of(callback).counted} == {1.0}
    assert "does not say which output a label is the target of" in why(callback)


def test_a_loss_that_changes_the_labels_is_read_at_what_the_model_gets(tmp_path: Path) -> None:
    class Half(LookingTrainer):
        def labels(self, inputs: Any) -> torch.Tensor:
            labels: torch.Tensor = inputs["labels"].clone()
            labels[0] = -100
            return labels

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, {**inputs, "labels": self.labels(inputs)}, *args, **kwargs)

    readings = Readings()
    made = uneven_trainer(tmp_path, health(readings), kind=Half, max_steps=3)
    made.train()
    check_entropy(readings, made.steps())
