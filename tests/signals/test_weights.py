"""Block norms, their imbalance and gradients against weights, computed another way in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.signals.exact import exact_norm
from torch import nn

from palingenesis.layers import Layers, find_layers
from palingenesis.signals.packet import Packet
from palingenesis.signals.values import Values
from palingenesis.signals.weights import WeightNorms, packed, unpacked

NORM, RATIO, GW = "health/weight_norm", "health/weight_norm_ratio", "health/gw_ratio"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)


class Model(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 40)
        self.head.weight = self.embed.weight  # tied: counted once


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def read(layers: Layers, **given: np.ndarray) -> Values:
    weights = WeightNorms(layers)
    return weights.decode(Packet(weights.compute()).arrays(), **given)


def rms(*parameters: nn.Parameter) -> float:
    squares = sum(exact_norm(parameter.detach()) ** 2 for parameter in parameters)
    return math.sqrt(squares / sum(parameter.numel() for parameter in parameters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_block_norms(dtype: torch.dtype) -> None:
    one = model().to(dtype)
    found = read(find_layers(one)).layers[NORM]
    expected = {f"layers.{i}": rms(*block.parameters()) for i, block in enumerate(one.layers)}
    expected |= {"embed": rms(one.embed.weight), "head": rms(one.head.bias)}
    assert found == pytest.approx(expected, rel=2e-5)


def test_a_block_twice_as_large_is_not_heavier() -> None:
    small, large = Model(width=16), Model(width=64)
    for one in (small, large):
        for parameter in one.parameters():
            nn.init.constant_(parameter, 0.5)
    assert read(find_layers(small)).layers[NORM] == pytest.approx(read(find_layers(large)).layers[NORM])


def test_imbalance_is_that_of_like_named_matrices() -> None:
    one = model()
    with torch.no_grad():
        one.layers[1].down.weight *= 200
        one.embed.weight *= 1e6  # nothing to compare it with
        one.layers[2].norm.weight *= 1e6  # no matrix
    values = [rms(block.down.weight) for block in one.layers]
    assert read(find_layers(one)).scalars[RATIO] == pytest.approx(max(values) / min(values), rel=2e-5)


def test_matrices_of_another_shape_or_kind_are_not_compared() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    with torch.no_grad():
        one[1].weight *= 1e3
    assert RATIO not in read(find_layers(one)).scalars


def test_zero_matrices() -> None:
    one = model()
    nn.init.zeros_(one.layers[0].up.weight)
    assert read(find_layers(one)).scalars[RATIO] == math.inf
    for block in one.layers:
        nn.init.zeros_(block.up.weight)
    assert read(find_layers(one)).scalars[RATIO] < 2


def test_non_finite_weights_are_told_as_they_are() -> None:
    one = model()
    with torch.no_grad():
        one.layers[0].up.weight[0, 0] = math.nan
    found = read(find_layers(one))
    assert math.isnan(found.layers[NORM]["layers.0"]) and math.isfinite(found.layers[NORM]["layers.1"])
    assert math.isnan(found.scalars[RATIO])


def test_gradients_against_weights() -> None:
    one = model()
    layers = find_layers(one)
    torch.manual_seed(1)
    for parameter in one.parameters():
        parameter.grad = torch.randn_like(parameter)
    norms = np.array(
        [
            math.hypot(*(exact_norm(u.parameter.grad) for u in layers.units if u.layer == name))
            for name in layers.names
        ]
    )
    found = read(layers, of_gradients=norms).layers[GW]
    for i, block in enumerate(one.layers):
        gradient = math.hypot(*(exact_norm(parameter.grad) for parameter in block.parameters()))
        weight = math.hypot(*(exact_norm(parameter.detach()) for parameter in block.parameters()))
        assert found[f"layers.{i}"] == pytest.approx(gradient / weight, rel=2e-5)

    absent = np.array([name.startswith("layers.1.") or name == "layers.0.norm" for name in layers.names])
    found = read(layers, of_gradients=norms, absent=absent).layers[GW]
    assert "layers.1" not in found and "layers.0" in found


def test_no_ratio_to_weights_of_zero() -> None:
    one = model()
    for parameter in one.layers[2].parameters():
        nn.init.zeros_(parameter)
    layers = find_layers(one)
    found = read(layers, of_gradients=np.ones(len(layers.names)))
    assert "layers.2" not in found.layers[GW] and f"{GW}/layers.2" in found.unavailable


def test_fused_parts_are_told_apart() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    one = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=8))
    with torch.no_grad():
        one.transformer.h[0].attn.c_attn.weight[:, :16] *= 500
    assert read(find_layers(one)).scalars[RATIO] == pytest.approx(500, rel=0.2)


def test_values_on_several_devices_add_up() -> None:
    layers = find_layers(model())
    found = {0: torch.tensor(1.5), 3: torch.tensor(2.5, dtype=torch.float64)}
    vectors = packed("name", found, layers)
    total = unpacked("name", {**{k: v.numpy() for k, v in vectors.items()}, "other/0": np.ones(1)}, layers)
    assert total[0] == 1.5 and total[3] == 2.5 and total.sum() == 4


def test_like_named_matrices_without_elements_are_not_compared() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(4, 3)}) for _ in range(2)
    )
    for block in model.layers:
        block["b"].weight = nn.Parameter(torch.zeros(0, 4))
    with torch.no_grad():
        model.layers[0]["a"].weight.fill_(1.0)
        model.layers[1]["a"].weight.fill_(3.0)
    weights = WeightNorms(find_layers(model))
    values = weights.decode(Packet(weights.compute()).arrays())
    assert values.scalars["health/weight_norm_ratio"] == pytest.approx(3.0)
