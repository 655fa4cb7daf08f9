"""HealthCallback in real runs of the Hugging Face ``Trainer``."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.tiny import At, arguments, gpt2, llama, poison, trainer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from palingenesis import Event, load_run
from palingenesis.errors import ConfigError, RecordExistsError
from palingenesis.integrations.transformers import STATE_FILE, HealthCallback

LAYER = "model.layers.0.mlp.down_proj"


def health(out: Path, **options: Any) -> HealthCallback:
    return HealthCallback(out=out, **{"check_every": 1, "warmup": 3, **options})


def is_untouched(trainer: Trainer) -> bool:
    names = ("training_step", "log", "_run_epoch", "_clip_grad_norm", "_finalize_training")
    return not (
        vars(trainer).keys() & set(names)
        or "clip_grad_norm_" in vars(trainer.accelerator)
        or "call_event" in vars(trainer.callback_handler)
    )


class Norms(TrainerCallback):
    """Layer norms computed without the monitor, where the gradients are not clipped."""

    def __init__(self, layer: str) -> None:
        self.layer, self.norms = layer, []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        squares = [
            float(p.grad.double().square().sum()) for p in model.get_submodule(self.layer).parameters()
        ]
        self.norms.append(sum(squares) ** 0.5)


@pytest.mark.parametrize("clip", [0.1, 0.0])
def test_gradients_are_read_before_clipping(tmp_path: Path, clip: float) -> None:
    fixed = {"learning_rate": 0.0, "optim": "sgd", "max_steps": 4}
    seen = Norms(LAYER)
    trainer(tmp_path / "bare", seen, max_grad_norm=0.0, **fixed).train()
    trained = trainer(tmp_path / "watched", health(tmp_path / "run"), max_grad_norm=clip, **fixed)
    trained.train()
    run = load_run(tmp_path / "run")
    np.testing.assert_allclose(run.layers[LAYER], seen.norms, rtol=1e-5)
    logged = [row["grad_norm_raw"] for row in trained.state.log_history if "grad_norm_raw" in row]
    np.testing.assert_allclose(run.metrics["train/grad_norm_raw"], logged, rtol=1e-5)
    assert min(logged) > 2 * 0.1
    assert run.info["gradients"] == "raw"


def test_weights_are_bit_identical(tmp_path: Path) -> None:
    finals = []
    for callbacks in ([], [health(tmp_path / "run")]):
        trained = trainer(tmp_path / "t", *callbacks, model=gpt2(), max_grad_norm=0.1, max_steps=50)
        trained.train()
        finals.append(trained.model.state_dict())
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    assert load_run(tmp_path / "run").verdict == "HEALTHY"


def test_four_micro_batches_are_one_step_with_the_loss_of_all(tmp_path: Path) -> None:
    trained = trainer(tmp_path / "t", health(tmp_path / "run"), gradient_accumulation_steps=4, max_steps=6)
    trained.train()
    run = load_run(tmp_path / "run")
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5, 6]
    logged = [row["loss"] for row in trained.state.log_history if "loss" in row]
    np.testing.assert_allclose(run.metrics["train/loss"], logged, rtol=1e-6)


def test_a_nan_loss_is_told_although_the_trainer_logs_zero(tmp_path: Path) -> None:
    trained = trainer(tmp_path / "t", At(5, poison), health(tmp_path / "run"))
    trained.train()
    assert trained.state.log_history[-2]["loss"] == 0.0
    run = load_run(tmp_path / "run")
    (event,) = [e for e in run.events if e.event == "nonfinite"]
    assert (event.step, event.source) == (5, "loss and gradients")
    assert run.verdict == "CRITICAL"


class Tracker(TrainerCallback):
    """Stands in for one of ``report_to``, which the trainer puts before everything it is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(dict(logs))


def test_values_reach_trackers_that_come_first_and_the_log_history(tmp_path: Path) -> None:
    first = Tracker()
    options = {"eval_strategy": "steps", "eval_steps": 6}
    trained = trainer(tmp_path / "t", first, health(tmp_path / "run"), **options)
    trained.train()
    for rows in (first.rows, trained.state.log_history):
        training = [row for row in rows if "loss" in row]
        assert len(training) == 12
        last = training[-1]
        assert last["health/checks"] == 12
        assert last["health/alarms_active"] == last["health/verdict"] == 0
        assert last["grad_norm_raw"] > 0
        others = [row for row in rows if "loss" not in row]
        assert len(others) == 3  # two evaluations and the summary
        assert not [name for row in others for name in row if name.startswith("health/")]


def test_values_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer(tmp_path / "t", health(tmp_path / "run"), report_to="tensorboard", max_steps=4).train()
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert found.Scalars("train/health/checks")[-1].value == 4
    assert found.Scalars("train/grad_norm_raw")[-1].value > 0


def test_a_layer_that_is_detached_in_mid_run_is_named(tmp_path: Path) -> None:
    layer = "transformer.h.0.mlp.c_proj"

    def detach(model: Any, **_: Any) -> None:
        model.get_submodule(layer).register_forward_hook(lambda module, given, result: result.detach())

    told: list[Event] = []
    callback = health(tmp_path / "run", on_event=told.append)
    trained = trainer(tmp_path / "t", At(8, detach), callback, model=gpt2(), max_steps=14)
    trained.train()
    alarms = [e for e in load_run(tmp_path / "run").events if e.event == "alarm"]
    upstream = {"transformer.h.0.ln_2", "transformer.h.0.mlp.c_fc"}
    assert {(e.layer, e.diagnosis) for e in alarms} == {(n, "no_gradient") for n in upstream | {layer}}
    (incident,) = [e for e in told if e.event == "incident"]
    assert incident.origin == layer
    assert trained.state.log_history[-2]["health/alarms_active"] == len(alarms)


@pytest.mark.parametrize("add_late", [False, True])
def test_stop_on_critical_ends_training_through_the_trainer(tmp_path: Path, add_late: bool) -> None:
    callback = health(tmp_path / "run", stop_on="critical")
    trained = trainer(tmp_path / "t", At(5, poison), *([] if add_late else [callback]))
    if add_late:
        trained.add_callback(callback)
    trained.train()
    assert trained.state.global_step == 5
    run = load_run(tmp_path / "run")
    assert run.info["end"]["reason"] == "completed"
    assert run.verdict == callback.monitor.verdict == "CRITICAL"


def test_an_exception_ends_the_record_with_its_name_and_passes_unchanged(tmp_path: Path) -> None:
    mine = RuntimeError("the disk is on fire")

    def burn(**_: Any) -> None:
        raise mine

    failing = At(5, burn, end=True)
    trained = trainer(tmp_path / "t", health(tmp_path / "run", overwrite=True), failing)
    with pytest.raises(RuntimeError) as caught:
        trained.train()
    assert caught.value is mine
    run = load_run(tmp_path / "run")
    assert run.verdict == "INTERRUPTED"
    assert "RuntimeError: the disk is on fire" in run.verdict_sentence
    assert run.info["end"]["steps"] == 5
    assert run.verify().ok
    assert is_untouched(trained)
    trained.pop_callback(failing)
    trained.train()
    assert load_run(tmp_path / "run").verdict == "HEALTHY"


class Failing(Trainer):
    """Fails in the model's own step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 3:
            raise ValueError("bad batch")
        return super().compute_loss(*args, **kwargs)


def test_an_exception_in_the_forward_pass_is_named(tmp_path: Path) -> None:
    trained = trainer(tmp_path / "t", health(tmp_path / "run"), kind=Failing)
    with pytest.raises(ValueError, match="bad batch"):
        trained.train()
    assert load_run(tmp_path / "run").info["end"]["error"] == "ValueError: bad batch"
    assert is_untouched(trained)


class TooLarge(Trainer):
    """Has no memory for more than one row."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(inputs["input_ids"]) > 1 and self.state.global_step == 2:
            raise RuntimeError("CUDA out of memory.")
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_smaller_batch_after_running_out_of_memory_goes_on_in_the_same_record(tmp_path: Path) -> None:
    trained = trainer(
        tmp_path / "t", health(tmp_path / "run"), kind=TooLarge, auto_find_batch_size=True, max_steps=6
    )
    trained.train()
    run = load_run(tmp_path / "run")
    assert run.info["resumed_from"] == [0]
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert run.verdict == "HEALTHY"


def test_resuming_goes_on_with_steps_baselines_and_record(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 6, "gradient_accumulation_steps": 2}
    whole = health(tmp_path / "whole")
    trained = trainer(tmp_path / "w", whole, **options)
    trained.train()
    first = trainer(tmp_path / "t", At(8, _interrupt, end=True), health(tmp_path / "run"), **options)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert (tmp_path / "t" / "checkpoint-6" / STATE_FILE).is_file()
    again = health(tmp_path / "run")
    second = trainer(tmp_path / "t", again, **options)
    second.train(resume_from_checkpoint=True)

    weights = (trained.model.state_dict(), second.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert again.monitor.state_dict() == whole.monitor.state_dict()
    run = load_run(tmp_path / "run")
    assert run.info["resumed_from"] == [6]
    assert [e.from_step for e in run.events if e.event == "run_resumed"] == [6]
    assert run.metrics["step"].tolist() == list(range(1, 13))
    assert run.judged.tolist()[6] > 0
    assert run.info["end"]["reason"] == "completed"
    assert run.verify().ok


def _interrupt(**_: Any) -> None:
    raise KeyboardInterrupt


def test_a_checkpoint_without_the_monitors_state_is_resumed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_strategy": "steps", "save_steps": 6}
    trainer(tmp_path / "t", max_steps=6, **options).train()
    with caplog.at_level(logging.WARNING, "palingenesis"):
        trainer(tmp_path / "t", health(tmp_path / "run"), max_steps=8, **options).train(
            resume_from_checkpoint=str(tmp_path / "t" / "checkpoint-6")
        )
    assert "baselines are learned anew" in caplog.text
    assert load_run(tmp_path / "run").metrics["step"].tolist() == [7, 8]


def test_the_record_of_another_run_is_not_continued(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 6}
    trainer(tmp_path / "t", health(tmp_path / "one"), max_steps=6, **options).train()
    trainer(tmp_path / "u", health(tmp_path / "two"), max_steps=2).train()
    with pytest.raises(RecordExistsError, match="already holds the run"):
        trainer(tmp_path / "t", health(tmp_path / "two"), **options).train(resume_from_checkpoint=True)


def test_the_same_callback_twice(tmp_path: Path) -> None:
    callback = health(tmp_path / "run", overwrite=True)
    for steps in (4, 6):
        trained = trainer(tmp_path / "t", callback, max_steps=steps)
        trained.train()
        assert is_untouched(trained)
        assert load_run(tmp_path / "run").info["end"]["steps"] == steps
    refused = trainer(tmp_path / "t", health(tmp_path / "run"))
    with pytest.raises(RecordExistsError):
        refused.train()
    assert is_untouched(refused)


def test_two_callbacks_on_one_trainer(tmp_path: Path) -> None:
    out = [tmp_path / "one", tmp_path / "two"]
    trained = trainer(tmp_path / "t", *[health(folder) for folder in out], gradient_accumulation_steps=2)
    trained.train()
    runs = [load_run(folder) for folder in out]
    assert runs[0].metrics["step"].tolist() == runs[1].metrics["step"].tolist() == list(range(1, 13))
    np.testing.assert_array_equal(runs[0].metrics["train/loss"], runs[1].metrics["train/loss"])
    assert is_untouched(trained)


def test_the_callback_can_be_copied_and_pickled_while_it_watches(tmp_path: Path) -> None:
    callback = health(tmp_path / "run", stop_on="warning")
    copies: list[HealthCallback] = []

    def copy_it(**_: Any) -> None:
        copies.extend([copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))])

    trained = trainer(tmp_path / "t", At(3, copy_it), callback, max_steps=5)
    trained.train()
    trained.save_model(str(tmp_path / "model"))
    assert [(c.out, c.stop_on, c.monitor) for c in copies] == [(tmp_path / "run", "warning", None)] * 2
    assert load_run(tmp_path / "run").info["end"]["steps"] == 5


def test_without_a_trainer_the_callback_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = health(tmp_path / "run")
    args, state, control = arguments(tmp_path, max_grad_norm=0.5), TrainerState(), TrainerControl()
    given = {"model": model, "optimizer": optimizer}
    with caplog.at_level(logging.WARNING, "palingenesis"):
        callback.on_train_begin(args, state, control, **given)
    assert "loss is not watched, gradients are read after clipping" in caplog.text
    for _ in range(3):
        callback.on_step_begin(args, state, control, **given)
        model(
            input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)
        ).loss.backward()
        callback.on_pre_optimizer_step(args, state, control, **given)
        callback.on_step_end(args, state, control, **given)
    callback.on_train_end(args, state, control, **given)
    run = load_run(tmp_path / "run")
    assert run.info["gradients"] == "clipped"
    assert run.metrics["step"].tolist() == [1, 2, 3]
    assert "train/loss" not in run.metrics


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stop_on": "sometimes"}, "stop_on='sometimes' cannot be used"),
        ({"check_evry": 5}, "did you mean 'check_every'"),
        ({"check_every": 0}, "check_every=0"),
        ({"scaler": None}, "sets 'scaler' itself"),
    ],
)
def test_bad_options_are_refused_at_once_in_one_line(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HealthCallback(**options)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_state_of_another_version_keeps_nothing_from_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path / "t", health(tmp_path / "run"), max_steps=4, **options).train()
    file = tmp_path / "t" / "checkpoint-4" / STATE_FILE
    state = json.loads(file.read_text())
    state["monitor"]["watchers"] = {"nothing": "known"}
    file.write_text(json.dumps(state))
    with caplog.at_level(logging.WARNING, "palingenesis"):
        trainer(tmp_path / "t", health(tmp_path / "run"), max_steps=6, **options).train(
            resume_from_checkpoint=True
        )
    assert "cannot be used" in caplog.text
    assert load_run(tmp_path / "run").metrics["step"].tolist() == [1, 2, 3, 4, 5, 6]
