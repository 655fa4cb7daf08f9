"""The demonstration's faults hit the layer they are put into, and no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from palingenesis.demo.faults import EXPLOSION, break_layer
from palingenesis.demo.model import CONTEXT, build_model
from palingenesis.demo.options import BROKEN_LAYER
from palingenesis.demo.training import next_token_loss
from palingenesis.errors import ConfigError

VOCABULARY = 300
BROKEN_WEIGHT = f"{BROKEN_LAYER}.weight"


@pytest.fixture
def model() -> nn.Module:
    return build_model(VOCABULARY, seed=0)


def gradients(model: nn.Module) -> tuple[float, dict[str, torch.Tensor | None]]:
    tokens = torch.arange(2 * CONTEXT).view(2, CONTEXT) % VOCABULARY
    model.zero_grad()
    loss = next_token_loss(model, tokens)
    loss.backward()
    return loss.item(), {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def test_the_model_is_small_and_the_same_for_the_same_seed(model: nn.Module) -> None:
    before = torch.get_rng_state()
    again, other = build_model(VOCABULARY, seed=0), build_model(VOCABULARY, seed=1)

    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert 2e6 < sum(p.numel() for p in build_model(1536, seed=0).parameters()) < 5e6


def test_no_gradient_takes_exactly_one_gradient_away_and_changes_nothing_else(model: nn.Module) -> None:
    loss, healthy = gradients(model)
    break_layer(model, BROKEN_LAYER, "no_gradient")
    broken_loss, broken = gradients(model)

    assert all(gradient is not None for gradient in healthy.values())
    assert [name for name, gradient in broken.items() if gradient is None] == [BROKEN_WEIGHT]
    assert broken_loss == loss
    assert all(torch.equal(broken[name], healthy[name]) for name in healthy if name != BROKEN_WEIGHT)


def test_exploding_multiplies_exactly_one_gradient(model: nn.Module) -> None:
    loss, healthy = gradients(model)
    break_layer(model, BROKEN_LAYER, "exploding")
    broken_loss, broken = gradients(model)

    assert broken_loss == loss
    torch.testing.assert_close(broken[BROKEN_WEIGHT], healthy[BROKEN_WEIGHT] * EXPLOSION)
    assert all(torch.equal(broken[name], healthy[name]) for name in healthy if name != BROKEN_WEIGHT)


def test_only_a_linear_layer_can_be_broken(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"nn\.Linear"):
        break_layer(model, "model.embed_tokens", "no_gradient")
