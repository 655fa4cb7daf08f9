"""What one step changed, against full copies and counts over all elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals.drift import Drift
from palingenesis.signals.packet import Packet
from palingenesis.signals.updates import Updates
from palingenesis.signals.values import Values
from palingenesis.signals.weights import WeightNorms

RATIO, LOST = "health/update_ratio", "health/update_lost_pct"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    one = nn.Module()
    one.embed = nn.Embedding(700, 256)
    one.layers = nn.ModuleList(Block(256) for _ in range(3))
    return one.to(dtype)


def give_gradients(one: nn.Module, seed: int = 1) -> None:
    source = torch.Generator().manual_seed(seed)
    for parameter in one.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=source).to(parameter.dtype)


def copies(one: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in one.named_parameters()}


def exact_ratio(one: nn.Module, before: dict[str, torch.Tensor], block: str) -> float:
    moved = start = 0.0
    for name, parameter in one.named_parameters():
        if name.startswith(f"{block}."):
            moved += float((parameter.detach().double() - before[name].double()).square().sum())
            start += float(before[name].double().square().sum())
    return math.sqrt(moved / start)


def exact_lost(one: nn.Module, before: dict[str, torch.Tensor]) -> float:
    touched = lost = 0
    for name, parameter in one.named_parameters():
        if parameter.grad is not None:
            has = parameter.grad != 0
            touched += int(has.sum())
            lost += int((has & (parameter.detach() == before[name])).sum())
    return 100 * lost / touched


def one_step(one: nn.Module, optimizer: Any, updates: Updates) -> tuple[Values, dict[str, torch.Tensor]]:
    before = copies(one)
    updates.arm(7)
    optimizer.step()
    return updates.decode(Packet(updates.compute(8)).arrays()), before


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW, 1e-4": lambda one: torch.optim.AdamW(one.parameters(), lr=1e-4),
    "AdamW, 1e-6": lambda one: torch.optim.AdamW(one.parameters(), lr=1e-6),
    "AdamW, 1e-8": lambda one: torch.optim.AdamW(one.parameters(), lr=1e-8),
    "SGD, 1e-3": lambda one: torch.optim.SGD(one.parameters(), lr=1e-3),
    "SGD, 1e-4": lambda one: torch.optim.SGD(one.parameters(), lr=1e-4),
    "SGD, 1e-6": lambda one: torch.optim.SGD(one.parameters(), lr=1e-6),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ratios_of_fp32_steps(name: str) -> None:
    one = model()
    optimizer = OPTIMIZERS[name](one)
    give_gradients(one)
    found, before = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
    ratios = found.layers.get(RATIO, {})
    for block in ("embed", "layers.0", "layers.1", "layers.2"):
        exact = exact_ratio(one, before, block)
        if block in ratios:
            assert ratios[block] == pytest.approx(exact, rel=0.12), block
        else:
            assert exact < 3e-6 and "rounding" in found.unavailable[f"{RATIO}/{block}"]


@pytest.mark.parametrize("name", ["SGD, 1e-3", "SGD, 1e-4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ratios_of_half_precision_steps(name: str, dtype: torch.dtype) -> None:
    """Most elements do not move at all, the others by a whole unit in the last place."""
    one = model(dtype)
    optimizer = OPTIMIZERS[name](one)
    give_gradients(one)
    found, before = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
    for block, value in found.layers[RATIO].items():
        assert value == pytest.approx(exact_ratio(one, before, block), rel=0.15), block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["AdamW, 1e-4", "AdamW, 1e-6", "SGD, 1e-3"])
def test_lost_updates_against_the_full_count(name: str, dtype: torch.dtype) -> None:
    one = model(dtype)
    optimizer = OPTIMIZERS[name](one)
    give_gradients(one)
    found, before = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
    error = found.scalars[f"{LOST}_se"]
    assert abs(found.scalars[LOST] - exact_lost(one, before)) <= 3 * error + 0.05 and error < 2


def test_bf16_loses_most_updates_at_1e_4_and_fp32_none() -> None:
    lost = {}
    for dtype in (torch.bfloat16, torch.float32):
        one = model(dtype)
        for block in one.layers:
            nn.init.normal_(block.up.weight, std=0.2)
            nn.init.normal_(block.down.weight, std=0.2)
        optimizer = OPTIMIZERS["AdamW, 1e-4"](one)
        give_gradients(one)
        found, _ = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
        lost[dtype] = found.scalars[LOST]
    assert lost[torch.bfloat16] > 50 and lost[torch.float32] < 0.1


def test_the_standard_error_is_one() -> None:
    """Over 40 draws of gradients and weights, errors are spread as stated."""
    errors = []
    for seed in range(40):
        torch.manual_seed(seed)
        one = nn.ModuleDict({"a": nn.Linear(256, 256), "b": nn.Embedding(600, 64)}).to(torch.bfloat16)
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-4)
        give_gradients(one, seed)
        found, before = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
        errors.append((found.scalars[LOST] - exact_lost(one, before)) / found.scalars[f"{LOST}_se"])
    root = math.sqrt(sum(error**2 for error in errors) / len(errors))
    assert 0.6 < root < 1.5


def test_a_learning_rate_of_zero_loses_nothing_and_moves_nothing() -> None:
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
    give_gradients(one)
    found, _ = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
    assert set(found.layers[RATIO].values()) == {0.0}
    assert LOST not in found.scalars and LOST in found.unavailable


def test_only_what_has_a_rate_and_a_gradient_is_counted() -> None:
    one = model(torch.bfloat16)
    groups = [
        {"params": list(one.embed.parameters()), "lr": 0.0},
        {"params": list(one.layers[0].parameters()), "lr": 1e3},
        {"params": list(one.layers[1].parameters()), "lr": 1e-4},  # without gradients
    ]  # the last block is in no group
    optimizer = torch.optim.SGD(groups, lr=1.0)
    give_gradients(one)
    for parameter in one.layers[1].parameters():
        parameter.grad = None
    found, _ = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
    assert found.scalars[LOST] == 0
    moved = {block for block, ratio in found.layers[RATIO].items() if ratio > 0}
    assert moved == {"layers.0"}


def test_elements_without_a_gradient_are_not_lost() -> None:
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    give_gradients(one)
    one.embed.weight.grad[::2] = 0
    found, before = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
    assert found.scalars[LOST] == pytest.approx(exact_lost(one, before), abs=0.1)


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    one = nn.Embedding(2000, 64, sparse=True, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(one.parameters(), lr=1e-4)
    ids = torch.arange(1000)
    (one(ids).float() * torch.randn(1000, 64)).sum().backward()
    updates = Updates(find_layers(one), [optimizer])
    before = one.weight.detach().clone()
    updates.arm(1)
    optimizer.step()
    found = updates.decode(Packet(updates.compute(2)).arrays())
    expected = 100 * float((one.weight[:1000] == before[:1000]).double().mean())
    assert abs(found.scalars[LOST] - expected) <= 3 * found.scalars[f"{LOST}_se"]


def test_frozen_layers_are_not_read() -> None:
    one = model()
    one.embed.requires_grad_(False)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    give_gradients(one)
    found, _ = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
    assert "embed" not in found.layers[RATIO]


def test_fused_and_transposed_parts() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    one = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=4, n_embd=64, vocab_size=64, n_positions=16))
    one = one.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-4)
    give_gradients(one)
    found, before = one_step(one, optimizer, Updates(find_layers(one), [optimizer]))
    assert abs(found.scalars[LOST] - exact_lost(one, before)) <= 3 * found.scalars[f"{LOST}_se"]


@pytest.mark.parametrize("narrower", [0, 100])
def test_sketches_and_norms_of_other_families_do(narrower: int) -> None:
    one = model()
    layers = find_layers(one)
    optimizer = OPTIMIZERS["AdamW, 1e-4"](one)
    give_gradients(one)
    drift, weights = Drift(layers), WeightNorms(layers)
    drift.begin()
    drift.compute(keep=True)
    weights.compute()
    updates = Updates(layers, [optimizer], width=drift.width - narrower)
    before = copies(one)
    updates.arm(1, weights.norms, drift.hand_over())
    assert drift.hand_over() == {}
    optimizer.step()
    found = updates.decode(Packet(updates.compute(2)).arrays())
    for block, value in found.layers[RATIO].items():
        assert value == pytest.approx(exact_ratio(one, before, block), rel=0.1), block


def test_only_the_very_next_step_counts() -> None:
    one = model()
    updates = Updates(find_layers(one))
    assert updates.compute(1) == {} and updates.decode({}) == Values()
    give_gradients(one)
    updates.arm(3)
    assert updates.compute(5) == {} and updates.compute(4) == {}


def test_a_skipped_step_has_no_numbers() -> None:
    one = model()
    give_gradients(one)
    updates = Updates(find_layers(one))
    updates.arm(1)
    found = updates.decode(Packet(updates.compute(2)).arrays(), skipped=True)
    assert found.scalars == {} and found.layers == {} and set(found.unavailable) == {RATIO, LOST}


def test_nothing_is_held_between_steps_and_little_within() -> None:
    one = model()
    size = sum(parameter.nbytes for parameter in one.parameters())
    updates = Updates(find_layers(one))
    give_gradients(one)
    state = torch.get_rng_state()
    updates.arm(1)
    assert 0 < updates.nbytes <= max(0.005 * size, 1 << 15)
    updates.compute(2)
    assert updates.nbytes == 0 and torch.equal(state, torch.get_rng_state())


def test_a_stored_zero_of_a_sparse_gradient_is_not_lost() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    values = torch.ones(1, 4)
    values[0, 0] = 0.0
    model.weight.grad = torch.sparse_coo_tensor(torch.tensor([[3]]), values, (10, 4), check_invariants=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    updates = Updates(find_layers(model), [optimizer])
    updates.arm(1)
    optimizer.step()
    found = updates.decode(Packet(updates.compute(2)).arrays())
    assert found.scalars["health/update_lost_pct"] == 0.0


def test_the_tiniest_step_of_a_short_double_precision_tensor() -> None:
    torch.manual_seed(0)
    model = nn.Linear(50, 50, bias=False, dtype=torch.float64)
    updates = Updates(find_layers(model))
    model.weight.grad = torch.ones_like(model.weight)
    updates.arm(1)
    with torch.no_grad():
        model.weight.mul_(1 + 1e-9)
    found = updates.decode(Packet(updates.compute(2)).arrays())
    assert found.layers["health/update_ratio"]["Linear"] == pytest.approx(1e-9, rel=1e-5)
