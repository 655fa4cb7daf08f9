"""What ``HealthCallback`` feeds from the Hugging Face ``Trainer``: tokens, weights, entropy, and no harm."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.looks import (
    LookingTrainer,
    Noting,
    Readings,
    UnshiftedTrainer,
    check_entropy,
    check_weights,
    health,
    monitor_of,
    uneven_trainer,
)
from tests.integrations.tiny import VOCABULARY, gpt2, llama, trainer
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration, Trainer

from palingenesis.errors import ConfigError
from palingenesis.integrations.transformers import HealthCallback
from palingenesis.signals.entropy import ERROR, NAME
from palingenesis.signals.tokens import EFFICIENCY, PADDING

pytestmark = pytest.mark.usefixtures("noting")


@pytest.mark.parametrize("size", [1, 4])
def test_tokens_and_entropy_of_every_step(tmp_path: Path, size: int) -> None:
    readings = Readings()
    callback = health(readings)
    options = {"gradient_accumulation_steps": size, "max_steps": 6, "learning_rate": 0.05}
    made = uneven_trainer(tmp_path, callback, eval_strategy="steps", eval_steps=2, **options)
    made.train()
    check_entropy(readings, made.steps(size))
    counts = [len(found) for found in vars(made)["micro_batches"]]
    noted = monitor_of(callback).counted
    assert [one.tokens for one in noted] == counts
    assert [one.step for one in noted] == list(itertools.chain(*([step] * size for step in range(1, 7))))
    every = 2 * 12 * size
    efficiencies = [sum(counts[: size * (i + 1)]) / (every * (i + 1)) for i in range(6)]
    np.testing.assert_allclose(readings.series(EFFICIENCY), efficiencies)
    assert 0 < readings.series(PADDING)[-1] < 100 * 2 / 12


def test_a_sample_of_positions_is_within_three_standard_errors(tmp_path: Path) -> None:
    readings = Readings()
    options = {"gradient_accumulation_steps": 2, "max_steps": 16, "learning_rate": 0.05}
    made = uneven_trainer(tmp_path, health(readings, entropy_positions=4), **options)
    made.train()
    errors = np.array(readings.series(ERROR))
    off = np.array(readings.series(NAME)) - made.steps(2)
    assert errors.min() > 0
    assert np.abs(off / errors).max() < 3
    assert np.abs(off).max() > 0


# -- weights -----------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def masked_model() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(vocab_size=VOCABULARY, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SMALL)
    )


def translation_model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's own."""
    loss: torch.Tensor = nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return loss / num_items_in_batch


def of_means(made: Any) -> None:
    made.loss_is_scaled_for_ga = False
    made.model_accepts_loss_kwargs = False


SETTINGS: dict[str, tuple[Any, Any, Any]] = {
    "the model divides by all tokens": (llama, None, "tokens"),
    "the model does not take their number": (
        llama,
        lambda made: setattr(made, "model_accepts_loss_kwargs", False),
        1.0,
    ),
    "the trainer says that losses are means": (llama, of_means, 1.0),
    "a loss of the user's": (llama, lambda made: setattr(made, "compute_loss_func", summed), "tokens"),
    "the model has no use for their number": (masked_model, None, 1.0),
    "an encoder and decoder": (translation_model, None, 1.0),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_weight_of_a_micro_batch_is_what_its_mean_loss_counts_for(tmp_path: Path, setting: str) -> None:
    """Against the losses that the trainer goes backward from, and means computed apart."""
    make, prepare, weight = SETTINGS[setting]
    callback = health(Readings())
    kind = LookingTrainer if make is llama else UnshiftedTrainer
    options = {"gradient_accumulation_steps": 4, "max_steps": 3, "learning_rate": 0.05}
    made = uneven_trainer(tmp_path, callback, kind=kind, model=make(), **options)
    if prepare is not None:
        prepare(made)
    made.train()
    noted = monitor_of(callback).counted
    assert [one.weight for one in noted] == [weight] * 12
    check_weights(made, noted, 4)


def test_label_smoothing_takes_the_labels_out_first(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings)
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
    made = uneven_trainer(tmp_path, callback, **options)
    made.train()
    check_entropy(readings, made.steps(2))
    check_weights(made, monitor_of(callback).counted, 2)


# -- no harm -----------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


class Copying(Trainer):
    """Copies its model while the loss is computed, with whatever stands on it."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self).setdefault("hooks", []).append(hooks(model))
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        vars(self)["twins"] = twins
        return super().compute_loss(model, *args, **kwargs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        assert hooks(model) == 0
        return loss


def test_weights_are_bit_identical_and_nothing_stays_behind(tmp_path: Path) -> None:
    finals = []
    readings = Readings()
    for callbacks in ([], [health(readings, entropy_positions=8)]):
        options = {"max_steps": 30, "gradient_accumulation_steps": 2}
        made = trainer(tmp_path, *callbacks, model=gpt2(), kind=Copying, **options)
        made.train()
        finals.append(made.model.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    assert not np.isnan(readings.series(NAME)).any()
    assert vars(made)["hooks"] == [2] + [1] * 59  # hidden states are not needed where there are logits
    assert hooks(made.model) == 0
    assert not vars(made).keys() & {"compute_loss", "training_step"}


def test_copies_made_while_a_hook_stands_see_nothing_and_hold_nothing(tmp_path: Path) -> None:
    callback = health(Readings())
    made = trainer(tmp_path, callback, kind=Copying, max_steps=2)
    made.train()
    before = len(monitor_of(callback).observed)
    for twin in vars(made)["twins"]:
        assert twin(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, VOCABULARY)
        assert b"palingenesis.monitor" not in pickle.dumps(twin)
    assert len(monitor_of(callback).observed) == before == 2


def test_hooks_stand_only_in_steps_that_are_logged(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings, logging_steps=3)
    made = trainer(tmp_path, callback, kind=Copying, max_steps=7, gradient_accumulation_steps=2)
    made.train()
    assert [bool(count) for count in vars(made)["hooks"]] == [
        step in (3, 6) for step in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)
    ]
    assert [step for step, _ in monitor_of(callback).observed] == [3, 3, 6, 6]
    entropies = {reading.step: reading.scalars.get(NAME) for reading in readings}
    assert entropies.get(3) is not None and entropies.get(6) is not None


def test_without_rl_readiness_only_labels_are_looked_at(tmp_path: Path) -> None:
    readings = Readings()
    callback = health(readings, entropy=False)
    made = trainer(tmp_path, callback, kind=Copying, max_steps=3)
    made.train()
    assert readings.series(EFFICIENCY) == [11 / 12] * 3
    assert vars(made)["hooks"] == [0] * 3
    assert not monitor_of(callback).observed
    assert not any(NAME in reading.scalars for reading in readings)


@pytest.mark.parametrize("method", ["batch", "observe_output"])
def test_a_failure_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(Noting, method, fail)
    made = trainer(tmp_path, health(Readings()), max_steps=3)
    with caplog.at_level(logging.WARNING, "palingenesis"):
        made.train()
    assert made.state.global_step == 3
    assert hooks(made.model) == 0
    assert [r.getMessage() for r in caplog.records if "no room" in r.getMessage()] == [
        "labels and outputs of the model are not watched any more: ValueError: no room"
    ]


def test_an_exception_in_the_loss_leaves_no_hook(tmp_path: Path) -> None:
    class Failing(Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            super().compute_loss(model, *args, **kwargs)
            assert hooks(model)
            raise RuntimeError("mine")

    made = trainer(tmp_path, health(Readings()), kind=Failing)
    with pytest.raises(RuntimeError, match="mine"):
        made.train()
    assert hooks(made.model) == 0
    assert "compute_loss" not in vars(made)


# -- what the monitor and the trackers are told ------------------------------------------------------------


def test_the_monitor_knows_the_last_step_and_options_cannot_say_another(tmp_path: Path) -> None:
    callback = health(Readings())
    made = trainer(tmp_path, callback, max_steps=-1, num_train_epochs=0.2)
    made.train()
    assert monitor_of(callback).last_step == made.state.global_step == 7
    with pytest.raises(ConfigError, match="sets 'max_steps' itself"):
        HealthCallback(max_steps=7)


def test_readings_reach_the_log_as_numbers(tmp_path: Path) -> None:
    readings = Readings()
    made = uneven_trainer(tmp_path, health(readings), max_steps=6, gradient_accumulation_steps=2)
    made.train()
    last = [row for row in made.state.log_history if "loss" in row][-1]
    for name in (NAME, ERROR, EFFICIENCY, PADDING):
        assert math.isfinite(last[name])
        assert last[name] in readings.series(name)
    told = {name: value for name, value in last.items() if name.startswith("health/")}
    assert all(isinstance(value, int | float) for value in told.values())
    assert {"health/alarms_active", "health/verdict", "health/checks"} <= told.keys()
    json.dumps(last)


def test_a_short_run_looks_at_its_weights_once_more(tmp_path: Path) -> None:
    readings = Readings()
    uneven_trainer(tmp_path, health(readings), max_steps=6).train()
    looked = [reading.step for reading in readings if "health/stable_rank" in reading.layers]
    assert looked == [1, 6]
    assert readings[-1].scalars["health/weight_drift_max"] > 0


def test_the_noise_scale_comes_from_micro_batches(tmp_path: Path) -> None:
    readings = Readings()
    options = {"max_steps": 40, "gradient_accumulation_steps": 4}
    uneven_trainer(tmp_path, health(readings, tier2_every=1), **options).train()
    assert readings[-1].labels["health/gns_source"] == "microbatch"
