"""Configurations that work badly are named, and their sound twins are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from palingenesis.preflight.sanity import check_config, planned_steps
from palingenesis.preflight.sanity_known import Known, SanityLimits
from palingenesis.preflight.sanity_model import (
    Made,
    check_disk,
    check_rounding,
    check_trainable_share,
    lost_share,
    make_without_weights,
    unmatched_targets,
)
from palingenesis.sft.config import TrainConfig, load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
#: A 4B model on two hundred thousand rows.
KNOWN = Known(parameters=4_000_000_000, vocabulary=150_000, rows=200_000, eval_rows=500)
LARGE_BATCH = {"train__per_device_batch_size": 8}
CHECKED = {"data__eval_dataset": "e"}
SHORT = {"train__max_steps": 30, "logging__check_every": 10, "logging__health_tier3_every": 30}


def config(**changes: Any) -> TrainConfig:
    """A sound configuration; ``section__option=value`` changes it."""
    made: dict[str, Any] = {
        "model": {"name_or_path": "m"},
        "data": {"dataset": "d", "max_seq_length": 2048},
        "train": {"learning_rate": 1e-5},
    }
    for name, value in changes.items():
        section, option = name.split("__")
        made.setdefault(section, {})[option] = value
    return TrainConfig(**made)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("config.learning_rate_high", {"train__learning_rate": 1e-3}, {"train__learning_rate": 5e-5}),
    ("config.learning_rate_high", {"model__lora": {"rank": 8}, "train__learning_rate": 2e-2},
     {"model__lora": {"rank": 8}, "train__learning_rate": 2e-4}),
    ("config.learning_rate_low", {"train__learning_rate": 1e-8}, {"train__learning_rate": 1e-6}),
    ("config.learning_rate_low", {"model__lora": {"rank": 8}, "train__learning_rate": 2e-6},
     {"model__lora": {"rank": 8}, "train__learning_rate": 1e-4}),
    ("config.learning_rate_low", {"train__optimizer": "sgd"},
     {"train__optimizer": "sgd", "train__learning_rate": 1e-2}),
    ("config.small_batch", {"train__gradient_accumulation_steps": 1},
     {"train__gradient_accumulation_steps": 4}),
    ("config.few_steps", {"train__gradient_accumulation_steps": 20_000},
     {"train__gradient_accumulation_steps": 64}),
    ("config.few_steps", {**SHORT, "train__max_steps": 19}, SHORT),
    ("config.long_warmup", {"train__warmup_ratio": 0.5}, {"train__warmup_ratio": 0.1}),
    ("config.data_repeated", {"train__epochs": 20}, {"train__epochs": 3}),
    ("config.data_repeated", {"train__max_steps": 200_000}, {"train__max_steps": 20_000}),
    ("config.eval_never", {**CHECKED, "data__eval_every": 50_000}, {**CHECKED, "data__eval_every": 100}),
    ("config.eval_costs", {**CHECKED, "data__eval_every": 1}, {**CHECKED, "data__eval_every": 50}),
    ("config.save_never", {"train__save_steps": 50_000}, {"train__save_steps": 500}),
    ("config.health_never", {**SHORT, "logging__health_tier3_every": 100}, SHORT),
    ("config.health_never", {**SHORT, "logging__check_every": 50}, SHORT),
    ("config.whole_logits", {**LARGE_BATCH, "memory__chunked_loss": False}, LARGE_BATCH),
    ("config.few_chunks", {**LARGE_BATCH, "memory__loss_num_chunks": 2},
     {**LARGE_BATCH, "memory__loss_num_chunks": 16}),
]  # fmt: skip


@pytest.mark.parametrize(("check", "ill", "sound"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
def test_each_is_named_and_its_twin_is_not(check: str, ill: dict[str, Any], sound: dict[str, Any]) -> None:
    found = {finding.check: finding for finding in check_config(config(**ill), KNOWN)}
    assert check in found
    assert found[check].fix
    assert check_config(config(**sound), KNOWN) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_ready_made_files_are_sound(path: Path) -> None:
    ready = load_config(path)
    size = {"qwen35_4b": 4.2e9, "qwen3_8b": 8.2e9, "llama32_1b": 1.24e9, "smollm2_135m": 1.35e8}
    vocabulary = {"qwen35_4b": 248_320, "qwen3_8b": 151_936, "llama32_1b": 128_256, "smollm2_135m": 49_152}
    name = path.parent.name
    known = Known(
        parameters=int(size.get(name, 3.3e6)),
        vocabulary=vocabulary.get(name, 1537),
        rows=200_000 if name in size else 810,
        eval_rows=ready.data.eval_samples or 90,
        world_size=2 if ready.parallel.strategy == "fsdp2" else 1,
    )
    assert check_config(ready, known) == []
    assert check_config(ready) == []


def test_far_above_is_worse_than_above() -> None:
    (above,) = check_config(config(train__learning_rate=5e-4), KNOWN)
    (far,) = check_config(config(train__learning_rate=5e-3), KNOWN)
    assert (above.severity, far.severity) == ("warning", "critical")
    assert (
        check_config(config(train__learning_rate=5e-4), KNOWN, SanityLimits(full_rates=((1e99, 1.0),))) == []
    )


def test_a_small_model_takes_a_higher_rate() -> None:
    assert check_config(config(train__learning_rate=1e-3), Known(parameters=100_000_000)) == []


def test_what_follows_the_proposals_is_sound() -> None:
    ill = {"train__learning_rate": 1e-2, "train__gradient_accumulation_steps": 1, "train__warmup_ratio": 0.9}
    fixes = " ".join(finding.fix for finding in check_config(config(**ill), KNOWN))
    assert "train.learning_rate to 2e-05" in fixes and "train.gradient_accumulation_steps to 16" in fixes
    sound = {
        "train__learning_rate": 2e-5,
        "train__gradient_accumulation_steps": 16,
        "train__warmup_ratio": 0.05,
    }
    assert check_config(config(**sound), KNOWN) == []


def test_steps_are_rounded_up_and_split_over_processes() -> None:
    assert planned_steps(config(), Known(rows=100)) == 7
    assert planned_steps(config(train__epochs=2), Known(rows=100, world_size=4)) == 4
    assert planned_steps(config(), Known()) is None
    assert planned_steps(config(train__max_steps=9), Known()) == 9
    assert len(Known().unknown) == 3 and KNOWN.unknown == []


# -- against the model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def test_a_model_is_counted_without_weights(model: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = make_without_weights(config(model__name_or_path=model))
    real = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    assert made.parameters == made.trained == sum(one.numel() for one in real.parameters())
    assert made.vocabulary == 100 and made.findings == ()


def test_targets_that_match_nothing(model: str) -> None:
    def findings(*targets: str) -> list[tuple[str, str]]:
        lora = {"rank": 2, "targets": list(targets)}
        made = make_without_weights(config(model__name_or_path=model, model__lora=lora))
        assert made.trained < made.parameters
        return [(finding.check, finding.severity) for finding in made.findings]

    assert findings("q_proj", "v_proj") == []
    assert findings("q_proj", "c_attn") == [("config.lora_targets", "warning")]
    assert findings("c_attn") == [("config.lora_targets", "critical")]
    # A norm is there and takes no adapter.
    assert findings("input_layernorm") == [("config.lora_targets", "critical")]
    assert unmatched_targets(["proj", "q_proj"], ["model.layers.0.q_proj"]) == ("proj",)


def test_adapters_as_large_as_the_model(model: str) -> None:
    def checks(rank: int) -> list[str]:
        lora = {"rank": rank}
        made = make_without_weights(config(model__name_or_path=model, model__lora=lora))
        return [finding.check for finding in made.findings]

    assert checks(64) == ["config.trainable_share"]
    assert checks(1) == []
    assert check_trainable_share(1, 100, 8) == []


def test_the_share_of_lost_updates_is_that_of_a_direct_count() -> None:
    torch.manual_seed(0)
    weights = 0.02 * torch.randn(200, 300)
    half = weights.to(torch.bfloat16)
    for update in (1e-6, 1e-5, 1e-4, 1e-3):
        direct = ((half + update) == half) & ((half - update) == half)
        assert lost_share([half], update) == pytest.approx(float(direct.float().mean()), abs=1e-3)
    assert lost_share([weights], 1e-6) < 0.01
    assert lost_share([torch.ones(5, dtype=torch.bfloat16)], 1e-3) == 1.0
    assert lost_share([], 1.0) == 0.0


def test_updates_that_round_away_are_told_by_their_share(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file({"w": 0.02 * torch.randn(300, 300), "norm": torch.ones(300)}, tmp_path / "model.safetensors")
    name = str(tmp_path)

    def severities(**changes: Any) -> list[str]:
        return [finding.severity for finding in check_rounding(config(model__name_or_path=name, **changes))]

    assert severities(train__learning_rate=1e-6) == ["warning"]
    assert severities(train__learning_rate=1e-5) == ["info"]
    assert severities(train__learning_rate=1e-3) == []
    assert severities(train__learning_rate=1e-6, model__torch_dtype="float32") == []
    assert severities(train__learning_rate=1e-6, model__lora={"rank": 2}) == []
    assert check_rounding(config(model__name_or_path="some/hub-name", train__learning_rate=1e-6)) == []


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    made = Made("M", parameters=10**9, trained=10**9, vocabulary=1)
    there = config(train__output_dir=str(tmp_path / "not" / "yet"), train__keep_checkpoints=3)
    # Weights of 2 GB and moments of 4, three kept and one being written, and the model.
    (found,) = check_disk(there, made, free=26 * 10**9 - 1)
    assert found.check == "config.disk" and found.evidence["needed_gb"] == pytest.approx(26)
    assert found.severity == "critical"
    assert [each.severity for each in check_disk(there, made, here=False, free=0)] == ["info"]
    assert check_disk(there, made, free=26 * 10**9) == []
    assert check_disk(there, Made("M", 10, 10, 1)) == []
    adapters = Made("M", parameters=10**9, trained=10**6, vocabulary=1)
    assert check_disk(there, adapters, free=10**9) == []


def test_defaults_in_a_short_run_are_nobodys_mistake() -> None:
    """The same cadence is a warning where it was chosen."""
    short = {"train__max_steps": 300}
    by_default = [one for one in check_config(config(**short), KNOWN) if one.check == "config.save_never"]
    given = check_config(config(**short, train__save_steps=400), KNOWN)
    chosen = [one for one in given if one.check == "config.save_never"]
    assert [one.severity for one in by_default] == ["info"]
    assert [one.severity for one in chosen] == ["warning"]
