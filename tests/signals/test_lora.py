"""Adapters of real PEFT models, against products formed in double precision."""

from __future__ import annotations

import copy
import math
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from palingenesis.signals.lora import DRIFT, PRODUCT, RANK, Adapters
from palingenesis.signals.packet import Packet
from palingenesis.signals.values import Values


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 48)
        self.wide = nn.Linear(48, 200)
        self.tall = nn.Linear(200, 48)
        self.conv = nn.Conv2d(16, 24, 3)
        self.grouped = nn.Conv2d(16, 24, 3, groups=2)


PREFIX = "base_model.model."
TARGETS = ["embed", "wide", "tall", "conv"]


def adapted(net: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS} | options
    return get_peft_model(net or Net(), LoraConfig(**given))


def fill(model: nn.Module, scale: float = 0.1) -> None:
    source = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (scale * torch.randn(parameter.shape, generator=source)).to(parameter.dtype)


def read(found: Adapters) -> Values:
    return found.decode(Packet(found.compute()).arrays())


def exact_rank(matrix: torch.Tensor) -> float:
    values = torch.linalg.svdvals(matrix)
    return float(values.square().sum() / values[0].square())


def assert_right(values: Values, model: Any, name: str, module: Any) -> None:
    """PEFT itself forms the change, in double precision."""
    module = copy.deepcopy(module).double()
    base = module.base_layer.weight.detach().flatten(1)
    change = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters).detach().flatten(1)
    assert values.layers[DRIFT][name] == pytest.approx(float(change.norm() / base.norm()), rel=1e-4)
    assert values.layers[PRODUCT][name] == pytest.approx(exact_rank(change), rel=1e-4)
    assert values.layers[RANK][name] == pytest.approx(exact_rank(base + change), rel=0.01)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 3.0])
def test_against_products_that_are_formed(scale: float) -> None:
    model = adapted()
    fill(model, scale)
    found = Adapters(model)
    values = read(found)
    assert values.unavailable == {} and set(values.layers[DRIFT]) == {PREFIX + name for name in TARGETS}
    for name in TARGETS:
        assert_right(values, model, PREFIX + name, getattr(model.base_model.model, name))
    assert values.scalars[f"{DRIFT}_max"] == max(values.layers[DRIFT].values())
    assert values.scalars[f"{RANK}_min"] == min(values.layers[RANK].values())
    assert values.scalars[f"{PRODUCT}_mean"] == pytest.approx(
        sum(values.layers[PRODUCT].values()) / len(TARGETS)
    )


def test_warm_calls_follow_the_training() -> None:
    model = adapted()
    found = Adapters(model)
    for step in range(6):
        fill(model, 0.05 * 2**step)
        values = read(found)
        for name in TARGETS:
            assert_right(values, model, PREFIX + name, getattr(model.base_model.model, name))


def test_the_transposed_layers_of_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16))
    model = adapted(net, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    fill(model)
    values = read(Adapters(model))
    block = model.base_model.model.transformer.h[0]
    assert_right(values, model, PREFIX + "transformer.h.0.attn.c_attn", block.attn.c_attn)
    assert_right(values, model, PREFIX + "transformer.h.0.mlp.c_fc", block.mlp.c_fc)


def test_several_active_adapters_are_added() -> None:
    model = adapted(target_modules=["wide"], use_rslora=True)
    model.add_adapter("second", LoraConfig(r=6, lora_alpha=3, target_modules=["wide"]))
    model.base_model.set_adapter(["default", "second"])
    fill(model)
    assert_right(read(Adapters(model)), model, PREFIX + "wide", model.base_model.model.wide)
    model.base_model.set_adapter("second")
    assert_right(read(Adapters(model)), model, PREFIX + "wide", model.base_model.model.wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    model = adapted(Net().to(dtype), target_modules=["wide", "tall"])
    fill(model)
    values = read(Adapters(model))
    for name in ("wide", "tall"):
        assert_right(values, model, PREFIX + name, getattr(model.base_model.model, name))


def test_a_rank_above_the_side_of_the_matrix() -> None:
    model = adapted(target_modules=["wide"], r=64)
    fill(model)
    assert_right(read(Adapters(model)), model, PREFIX + "wide", model.base_model.model.wide)


def test_adapters_as_they_start() -> None:
    values = read(Adapters(adapted()))
    assert set(values.layers[DRIFT].values()) == {0.0}
    assert PRODUCT not in values.layers and len(values.unavailable) == len(TARGETS)
    assert values.layers[RANK][PREFIX + "wide"] > 10


def test_a_change_that_cancels_the_base_weight() -> None:
    """The merged weight has one direction less; its norm is a difference of nearly equal numbers."""
    net = nn.Module()
    net.wide = nn.Linear(30, 40, bias=False)
    u, v = torch.randn(40, 2), torch.randn(2, 30)
    net.wide.weight.data = 100 * u @ v + torch.randn(40, 30)
    model = adapted(net, target_modules=["wide"], r=2, lora_alpha=2)
    model.base_model.model.wide.lora_A["default"].weight.data = v.clone()
    model.base_model.model.wide.lora_B["default"].weight.data = -100 * u
    assert_right(read(Adapters(model)), model, PREFIX + "wide", model.base_model.model.wide)


@pytest.mark.parametrize("left", [1.0, 0.1, 0.01, 1e-3, 1e-5, 1e-6])
def test_what_little_is_left_of_a_base_weight_is_right_or_withheld(left: float) -> None:
    """Both terms of the merged weight are larger than their sum: the rest may be rounding."""
    torch.manual_seed(0)
    net = nn.Module()
    net.wide = nn.Linear(30, 40, bias=False)
    u, v = torch.randn(40, 2), torch.randn(2, 30)
    net.wide.weight.data = u @ v + left * torch.randn(40, 30)
    model = adapted(net, target_modules=["wide"], r=2, lora_alpha=2)
    model.base_model.model.wide.lora_A["default"].weight.data = v.clone()
    model.base_model.model.wide.lora_B["default"].weight.data = -u
    values = read(Adapters(model))
    if left >= 1e-3:
        assert_right(values, model, PREFIX + "wide", model.base_model.model.wide)
    else:
        assert RANK not in values.layers
        assert "cancel" in values.unavailable[f"{RANK}/{PREFIX}wide"]


def test_factors_whose_product_is_out_of_range() -> None:
    """Either has elements that fp32 holds; their product would be 0, or infinite."""
    for size in (1e-30, 1e25):
        model = adapted(target_modules=["wide"])
        fill(model, size)
        values = read(Adapters(model))
        module = copy.deepcopy(model.base_model.model.wide).double()
        base, change = module.base_layer.weight.detach(), module.get_delta_weight("default").detach()
        drift = float(torch.linalg.matrix_norm(change / size**2)) * size**2
        drift /= float(torch.linalg.matrix_norm(base))
        assert values.layers[DRIFT][PREFIX + "wide"] == pytest.approx(drift, rel=1e-4)
        assert values.layers[PRODUCT][PREFIX + "wide"] == pytest.approx(
            exact_rank(change / size**2), rel=1e-4
        )


def test_a_base_weight_that_is_loaded_anew() -> None:
    model = adapted(target_modules=["wide"])
    fill(model)
    found = Adapters(model)
    read(found)
    with torch.no_grad():
        model.base_model.model.wide.base_layer.weight *= 3
    assert_right(read(found), model, PREFIX + "wide", model.base_model.model.wide)


def test_non_finite_factors_are_told_as_they_are() -> None:
    model = adapted(target_modules=["wide", "tall"])
    fill(model)
    model.base_model.model.wide.lora_B["default"].weight.data[0, 0] = math.nan
    values = read(Adapters(model))
    for name in (DRIFT, PRODUCT, RANK):
        assert math.isnan(values.layers[name][PREFIX + "wide"])
        assert math.isfinite(values.layers[name][PREFIX + "tall"])


# -- what is refused -------------------------------------------------------------------------------------


def refusal(model: nn.Module, name: str = "wide") -> str:
    values = read(Adapters(model))
    assert values.layers == {} and values.scalars == {}
    reasons = {values.unavailable[f"{signal}/{PREFIX}{name}"] for signal in (DRIFT, PRODUCT, RANK)}
    (reason,) = reasons
    return reason


def test_dora() -> None:
    model = adapted(target_modules=["wide"], use_dora=True)
    fill(model)
    assert "DoRA" in refusal(model)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_starts_that_change_the_base_weight(start: str) -> None:
    assert "start at zero" in refusal(adapted(target_modules=["wide"], init_lora_weights=start))


def test_merged_and_switched_off_adapters() -> None:
    model = adapted(target_modules=["wide"])
    fill(model)
    with model.disable_adapter():
        assert "switched off" in refusal(model)
    model.merge_adapter()
    assert "merged" in refusal(model)


def test_a_base_weight_that_trains() -> None:
    model = adapted(target_modules=["wide"])
    model.base_model.model.wide.base_layer.weight.requires_grad_(True)
    assert "trains" in refusal(model)


def test_quantised_base_weights() -> None:
    model = adapted(target_modules=["wide"])
    base = model.base_model.model.wide.base_layer
    base.weight = nn.Parameter(torch.zeros(200, 24, dtype=torch.uint8), requires_grad=False)
    assert "quantised" in refusal(model)


def test_convolutions_in_groups() -> None:
    assert "groups" in refusal(adapted(target_modules=["grouped"]), "grouped")


@pytest.mark.parametrize(
    "config",
    [
        peft.LoHaConfig(r=2, target_modules=["wide"]),
        peft.IA3Config(target_modules=["wide"], feedforward_modules=[]),
        peft.VeraConfig(r=2, target_modules=["wide"]),
        peft.AdaLoraConfig(init_r=2, target_modules=["wide"], total_step=10),
        peft.OFTConfig(r=0, oft_block_size=8, target_modules=["wide"]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_methods(config: Any) -> None:
    assert refusal(get_peft_model(Net(), config))


def test_models_without_adapters_have_no_values() -> None:
    assert read(Adapters(Net())) == Values()


def test_parameters_are_the_adapters_own() -> None:
    model = adapted()
    named = {name for name, p in model.named_parameters() if id(p) in Adapters(model).parameters}
    assert named == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_nothing_is_touched() -> None:
    model = adapted()
    fill(model)
    state, before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    read(Adapters(model))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
