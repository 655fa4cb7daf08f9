"""Training code that is broken on purpose is found out in its first steps, and sound code is not accused."""

from __future__ import annotations

import hashlib
import math
import random
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from tests.sft.runs import settings
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from palingenesis.preflight import first_steps_checks as checks
from palingenesis.preflight import first_steps_parameters as parameters
from palingenesis.preflight.first_steps import first_steps
from palingenesis.preflight.first_steps_trainer import untouched_random_numbers, without_dropout
from palingenesis.sft.config import TrainConfig

Batch = dict[str, torch.Tensor]
VOCABULARY = 50


def small_model(*, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def batch_of(*targets: int, seed: int = 0) -> Batch:
    """Rows of twelve tokens, with so many loss-bearing ones at their ends."""
    ids = torch.randint(0, VOCABULARY, (len(targets), 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row, count in enumerate(targets):
        labels[row, : 12 - count] = -100
    return {"input_ids": ids, "labels": labels}


def joined(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def tokens_of(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


# -- accumulation ------------------------------------------------------------------------------------------


def by_tokens(model: nn.Module, batches: Sequence[Batch]) -> None:
    total = sum(tokens_of(batch) for batch in batches)
    for batch in batches:
        (checks.whole_cross_entropy(model, batch)[0] / total).backward()


def mean_of_means(model: nn.Module, batches: Sequence[Batch]) -> None:
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()


def sum_of_means(model: nn.Module, batches: Sequence[Batch]) -> None:
    for batch in batches:
        model(**batch).loss.backward()


def accumulated(
    run: Callable[[nn.Module, Sequence[Batch]], None], batches: Sequence[Batch]
) -> checks.Comparison:
    model = small_model()
    found = parameters.gradients_of(model, lambda: run(model, batches))
    whole = parameters.gradients_of(model, lambda: by_tokens(model, [joined(batches)]))
    return checks.compare(found, whole)


UNEQUAL = [batch_of(2, 3), batch_of(11, 10, seed=1)]
EQUAL = [batch_of(6, 6), batch_of(6, 6, seed=1)]


@pytest.mark.parametrize(
    ("run", "batches", "sound"),
    [
        (by_tokens, UNEQUAL, True),
        (mean_of_means, UNEQUAL, False),
        (mean_of_means, EQUAL, True),  # weighing by rows and by tokens is the same here
        (sum_of_means, UNEQUAL, False),
        (sum_of_means, EQUAL, False),
    ],
)
def test_accumulated_gradients(run: Any, batches: list[Batch], sound: bool) -> None:
    found = accumulated(run, batches)
    findings = checks.check_accumulation(found, micro_batches=2, dtype=torch.float32)
    assert [finding.check for finding in findings] == ([] if sound else ["first_step.accumulation"])


def test_a_gradient_that_is_summed_is_twice_as_long() -> None:
    found = accumulated(sum_of_means, EQUAL)
    assert found.ratio == pytest.approx(2.0, rel=1e-4) and found.cosine == pytest.approx(1.0, rel=1e-6)
    (finding,) = checks.check_accumulation(found, micro_batches=2, dtype=torch.float32)
    assert "2 times as long" in finding.message


def test_gradients_that_are_missing_count_as_zero() -> None:
    one, other = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2)}
    assert checks.compare(one, other).error == pytest.approx(1.0)
    assert checks.compare(other, one).error == pytest.approx(math.sqrt(0.5))
    assert checks.compare({}, {}).error == 0.0


# -- first loss --------------------------------------------------------------------------------------------


def test_the_independent_loss_is_that_of_transformers() -> None:
    model, batch = small_model(), batch_of(5, 9)
    summed, tokens = checks.whole_cross_entropy(model, batch)
    assert tokens == 14
    assert float(summed) / tokens == pytest.approx(float(model(**batch).loss), rel=1e-5)


def first_loss(ours: float, independent: float, *, pretrained: bool = True) -> list[str]:
    found = checks.check_first_loss(
        ours, independent, vocabulary=32_000, pretrained=pretrained, dtype=torch.float32
    )
    return [finding.check for finding in found]


def test_first_losses() -> None:
    assert first_loss(1.8, 1.8) == []
    assert first_loss(10.4, 10.4) == ["first_step.loss_at_random"]
    assert first_loss(10.4, 10.4, pretrained=False) == []
    assert first_loss(1.8, 1.9) == ["first_step.loss_differs"]
    assert first_loss(math.nan, 1.9) == ["first_step.loss_not_finite"]
    assert first_loss(1.8, math.nan) == ["first_step.loss_differs"]


# -- parameters --------------------------------------------------------------------------------------------


def test_an_optimizer_with_stale_parameters() -> None:
    model = small_model()
    stale = torch.optim.AdamW(model.parameters())
    assert parameters.check_optimizer(model, stale) == []
    model.lm_head = nn.Linear(16, VOCABULARY, bias=False)
    (found,) = parameters.check_optimizer(model, stale)
    assert found.check == "first_step.optimizer_stale"
    assert found.evidence == {"lacking": ["lm_head.weight"], "count": 1, "strangers": 1}


def test_a_frozen_parameter_in_the_optimizer_is_no_mistake() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.lm_head.weight.requires_grad_(False)
    assert parameters.check_optimizer(model, optimizer) == []


class Adapted(nn.Module):
    """A frozen embedding and an adapter under reentrant checkpointing: what old code does."""

    def __init__(self, *, inputs_have_gradients: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4).requires_grad_(False)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.head = nn.Linear(2, 1)
        self._inputs_have_gradients = inputs_have_gradients

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        if self._inputs_have_gradients:  # what enable_input_require_grads() does
            hidden.requires_grad_(True)
        inner: torch.Tensor = torch.utils.checkpoint.checkpoint(self.lora_A, hidden, use_reentrant=True)
        found: torch.Tensor = self.head(inner)
        return found.mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("sound", [True, False])
def test_adapters_under_checkpointing_need_inputs_with_gradients(sound: bool) -> None:
    model = Adapted(inputs_have_gradients=sound)
    found = parameters.check_gradients(
        model, parameters.gradients_of(model, lambda: model(torch.arange(5)).backward())
    )
    assert [finding.check for finding in found] == ([] if sound else ["first_step.no_gradient"])
    assert sound or (found[0].evidence["parameters"] == ["lora_A.weight"] and "checkpointing" in found[0].fix)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> list[str]:
    batch, before = batch_of(11, 11), parameters.fingerprints(model)
    largest: dict[str, float] = {}
    for _ in range(steps):
        model.zero_grad()
        model(**batch).loss.backward()
        for name, one in parameters.trained_parameters(model).items():
            if one.grad is not None:
                largest[name] = max(largest.get(name, 0.0), float(one.grad.abs().max()))
        optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    found = parameters.check_moves(model, before, largest, learning_rate=rate, steps=steps)
    return [finding.check for finding in found]


def test_every_parameter_moves() -> None:
    model = small_model()
    assert stepped(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) == []


def test_a_parameter_that_the_optimizer_lacks_stays() -> None:
    model = small_model()
    held = [one for name, one in model.named_parameters() if "layers.0" not in name]
    assert stepped(model, torch.optim.AdamW(held, lr=1e-3)) == ["first_step.stays"]


def test_a_parameter_that_nothing_reaches() -> None:
    model = small_model()
    model.extra = nn.Parameter(torch.ones(3))
    assert stepped(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) == ["first_step.zero_gradient"]


def test_updates_that_round_away_are_no_stale_optimizer() -> None:
    model = small_model(dtype=torch.bfloat16)
    assert stepped(model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)) == [
        "first_step.rounds_away"  # the norms, which are 1
    ]


def test_small_steps_of_sgd_round_away_too() -> None:
    model = small_model(dtype=torch.bfloat16)
    batch, before = batch_of(11), parameters.fingerprints(model)
    gradients = parameters.gradients_of(model, lambda: model(**batch).loss.backward())
    largest = {name: float(one.abs().max()) for name, one in gradients.items()}
    found = parameters.check_moves(model, before, largest, learning_rate=1e-12, steps=1, adaptive=False)
    assert [finding.check for finding in found] == ["first_step.rounds_away"]


def test_a_fingerprint_sees_one_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        layer = nn.Linear(64, 64, bias=False, dtype=dtype)
        before = parameters.fingerprints(layer)
        assert parameters.fingerprints(layer) == before
        with torch.no_grad():
            layer.weight[3, 5] = torch.nextafter(layer.weight[3, 5], torch.tensor(9.0, dtype=dtype))
        assert parameters.fingerprints(layer) != before


# -- schedule ----------------------------------------------------------------------------------------------


def run_config(**train: Any) -> TrainConfig:
    return TrainConfig(model={"name_or_path": "m"}, data={"dataset": "d"}, train=train)


SCHEDULES = [
    {"lr_scheduler": kind, "min_learning_rate": least, "warmup_ratio": warmup}
    for kind, least in (
        ("cosine", 0.0),
        ("cosine", 1e-6),
        ("linear", 0.0),
        ("linear", 1e-6),
        ("constant", 0.0),
    )
    for warmup in (0.0, 0.05, 0.2)
]


def learning_rates(config: TrainConfig, steps: int, *, times: int = 1) -> Iterator[float]:
    """What transformers' schedulers give, stepped so many times a step."""
    from transformers import get_scheduler

    from palingenesis.sft.arguments import schedule_of

    name, more = schedule_of(config.train)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=config.train.learning_rate)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=math.ceil(config.train.warmup_ratio * steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=more,
    )
    for _ in range(steps // times):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        for _ in range(times):
            scheduler.step()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: "-".join(map(str, each.values())))
def test_the_plan_is_what_transformers_does_and_nothing_faster(schedule: dict[str, Any]) -> None:
    config, steps = run_config(**schedule), 200

    def planned(done: int) -> float:
        return checks.planned_rate(config, steps, done)

    assert checks.check_schedule(list(learning_rates(config, steps)), planned) == []
    if schedule["lr_scheduler"] == "constant" and not schedule["warmup_ratio"]:
        return  # the same at any speed
    for times in (2, 8):
        (found,) = checks.check_schedule(list(learning_rates(config, steps, times=times))[:4], planned)
        assert found.check == "first_step.schedule"
        assert found.evidence["times_as_fast"] == times


# -- processes ---------------------------------------------------------------------------------------------


def test_processes_that_share_rows() -> None:
    assert checks.check_ranks([]) == [] and checks.check_ranks([[1, 2], [3, 4], [5, 2]]) == []
    (found,) = checks.check_ranks([[1, 2], [3, 4], [1, 2]])
    assert found.check == "first_step.same_rows" and found.evidence["pairs"] == [[0, 2]]


@pytest.mark.parametrize("sound", [True, False])
def test_the_runs_own_processes(folder: Path, sound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not sound:
        # A loader that nobody shares out.
        monkeypatch.setattr(
            "accelerate.data_loader.prepare_data_loader",
            lambda loader, **_: types.SimpleNamespace(base_dataloader=loader),
        )
    outcome = first_steps(changed(folder, {}), pretrained=False, world_size=3)
    assert [finding.check for finding in outcome.findings] == ([] if sound else ["first_step.same_rows"])


# -- overfit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "severity"),
    [
        ([2.0, 2.1, 1.8, 1.5], None),
        ([2.0, 1.999999, 2.0, 2.000001], "warning"),
        ([2.0, 3.0, 9.0, 8.0], "critical"),
        ([2.0, 1.0, math.nan, math.nan], "critical"),
    ],
)
def test_overfits(losses: list[float], severity: str | None) -> None:
    found = checks.check_overfit(losses, learning_rate=1e-4)
    assert [finding.severity for finding in found] == ([severity] if severity else [])


# -- the run itself ----------------------------------------------------------------------------------------


def changed(folder: Path, changes: dict[str, Any]) -> TrainConfig:
    lora = changes.pop("lora", None)
    made = settings(folder, **changes)
    made["model"]["lora"] = lora
    return TrainConfig(**made)


RUNS: list[dict[str, Any]] = [
    {},
    {"data__packing": True},
    {"plugins__info_sft": True},
    {"plugins__deft": True},
    {"train__optimizer": "adafactor"},
    {"memory__chunked_loss": False},
    {"lora": {"rank": 2}, "train__gradient_checkpointing": True},
    {
        "train__gradient_accumulation_steps": 1,
        "train__per_device_batch_size": 1,
        "train__lr_scheduler": "linear",
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.mark.parametrize("changes", RUNS, ids=lambda each: "-".join(each) or "plain")
def test_a_sound_run_is_silent(folder: Path, changes: dict[str, Any]) -> None:
    outcome = first_steps(changed(folder, dict(changes)), pretrained=False)
    assert outcome.findings == [] and outcome.not_checked == []
    facts = outcome.facts
    assert facts["first_loss"]["training"] == pytest.approx(facts["first_loss"]["independent"], rel=1e-4)
    assert facts["accumulation"]["error"] < 1e-4
    assert facts["learning_rates"][:2] == [0.0, 0.01]
    assert facts["overfit_losses"][-1] < facts["overfit_losses"][0]
    assert facts["tokens_per_second"] > 0


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_nothing_is_left_behind(folder: Path) -> None:
    config = changed(folder, {})
    before = digests(folder)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first_steps(config, pretrained=False)
    assert digests(folder) == before and not Path(config.train.output_dir).exists()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_a_model_without_knowledge_is_not_pretrained(folder: Path) -> None:
    outcome = first_steps(changed(folder, {}))
    assert [finding.check for finding in outcome.findings] == ["first_step.loss_at_random"]


def test_a_rate_that_blows_up(folder: Path) -> None:
    outcome = first_steps(changed(folder, {"train__learning_rate": 30.0}), pretrained=False)
    assert "first_step.no_overfit" in [finding.check for finding in outcome.findings]


def test_a_rate_that_moves_nothing(folder: Path) -> None:
    config = changed(folder, {"train__learning_rate": 1e-9, "model__torch_dtype": "bfloat16"})
    outcome = first_steps(config, pretrained=False)
    found = {finding.check: finding.severity for finding in outcome.findings}
    assert found["first_step.no_overfit"] == "warning" and found["first_step.rounds_away"] == "info"
    assert "first_step.stays" not in found


def test_training_code_that_averages_means(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.sft.trainer import FineTuner

    def mean(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        value, output = self._value(model, inputs, None)
        loss = value.loss_sum / value.tokens / 2
        return (loss, output) if return_outputs else loss

    monkeypatch.setattr(FineTuner, "compute_loss", mean)
    outcome = first_steps(changed(folder, {}), pretrained=False)
    assert [finding.check for finding in outcome.findings] == ["first_step.accumulation"]


def test_training_code_whose_scheduler_is_too_fast(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.sft.trainer import FineTuner

    plain = FineTuner.create_scheduler

    def twice(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = plain(self, num_training_steps, optimizer)
        step = scheduler.step
        scheduler.step = lambda *a: (step(), step())
        return scheduler

    monkeypatch.setattr(FineTuner, "create_scheduler", twice)
    outcome = first_steps(changed(folder, {"train__max_steps": 100}), pretrained=False)
    (found,) = outcome.findings
    assert found.check == "first_step.schedule" and found.evidence["times_as_fast"] == 2


def test_a_model_that_is_not_all_trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.sft.trainer import FineTuner

    plain = FineTuner.create_optimizer

    def lacking(self: Any, *args: Any) -> Any:
        optimizer = plain(self, *args)
        group = optimizer.param_groups[0]
        group["params"] = group["params"][1:]
        return optimizer

    monkeypatch.setattr(FineTuner, "create_optimizer", lacking)
    outcome = first_steps(changed(folder, {}), pretrained=False)
    assert {finding.check for finding in outcome.findings} == {
        "first_step.optimizer_stale",
        "first_step.stays",
    }


def test_dropout_comes_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    with without_dropout(model):
        assert torch.equal(model(torch.ones(4)), model(torch.ones(4)))
    assert model[1].p == 0.5


def test_random_numbers_go_on_after_an_error() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(RuntimeError), untouched_random_numbers():
        torch.rand(5) @ torch.rand(4)
    assert torch.equal(torch.rand(2), expected)
