"""What configurations say of logits, against what models of transformers do to them."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palingenesis.lm_head import after_head

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}

# Class, what is set, and what follows from it.
KINDS: list[tuple[str, dict[str, Any], float, float | None]] = [
    ("Llama", {}, 1.0, None),
    ("Qwen3", {}, 1.0, None),
    ("Gemma2", {"final_logit_softcapping": 2.0}, 1.0, 2.0),
    ("Gemma2", {"final_logit_softcapping": None}, 1.0, None),
    ("Granite", {"logits_scaling": 4.0}, 0.25, None),
    ("Cohere", {"logit_scale": 3.0}, 3.0, None),
]


def make(name: str, options: dict[str, Any]) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    return model


@pytest.mark.parametrize(("name", "options", "scale", "soft_cap"), KINDS)
def test_logits_are_what_is_said_of_them(
    name: str, options: dict[str, Any], scale: float, soft_cap: float | None
) -> None:
    model = make(name, options)
    found = after_head(model)
    assert found == {"scale": scale, "soft_cap": soft_cap}
    ids = torch.arange(12)[None] + 1
    with torch.no_grad():
        made = (
            model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state) * found["scale"]
        )
        if soft_cap is not None:
            made = soft_cap * torch.tanh(made / soft_cap)
        logits = model(input_ids=ids).logits
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(made, logits, rtol=1e-5, atol=1e-6)


def told(**fields: Any) -> dict[str, float | None]:
    text = SimpleNamespace(**{"model_type": "any", **fields})
    return after_head(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text)))


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 1.0),
        ({"logit_scale": 2}, 2.0),
        ({"output_multiplier": 0.5}, 0.5),
        ({"lm_head_multiplier": 0.25}, 0.25),
        ({"logits_scaling": 8}, 0.125),
        ({"logits_scaling": 8, "model_type": "hyperclovax"}, 8.0),
        ({"logit_scale": None, "logits_scaling": None}, 1.0),
        ({"logit_scale": None, "logits_scaling": 2.0}, 0.5),
    ],
)
def test_names_of_factors(fields: dict[str, Any], scale: float) -> None:
    found = told(**fields)
    assert found == {"scale": scale, "soft_cap": None}
    assert isinstance(found["scale"], float)


def test_the_language_part_of_a_model_with_others() -> None:
    assert told(final_logit_softcapping=30.0) == {"scale": 1.0, "soft_cap": 30.0}
