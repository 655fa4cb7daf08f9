"""Drift against differences of copies in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from palingenesis.errors import ConfigError
from palingenesis.layers import find_layers
from palingenesis.signals import drift as drift_module
from palingenesis.signals.drift import Drift, widest_within
from palingenesis.signals.packet import Packet
from palingenesis.signals.values import Values

NAME = "health/weight_drift"
TOLERANCE = 0.10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """1.7 million parameters, of which 0.5% are 1,000 numbers a matrix."""
    torch.manual_seed(0)
    one = nn.Module()
    one.embed = nn.Embedding(700, 256)
    one.layers = nn.ModuleList(Block(256) for _ in range(4))
    return one.to(dtype)


def read(drift: Drift) -> Values:
    return drift.decode(Packet(drift.compute()).arrays())


def exact(one: nn.Module, before: dict[str, torch.Tensor], layer: str) -> float:
    moved = start = 0.0
    for name, parameter in one.named_parameters():
        if name.rpartition(".")[0] == layer:
            moved += float((parameter.detach().double() - before[name].double()).square().sum())
            start += float(before[name].double().square().sum())
    return math.sqrt(moved / start)


def rotate(weight: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(noise(weight.shape[0], weight.shape[0])).Q @ weight


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def outer(weight: torch.Tensor) -> torch.Tensor:
    return torch.outer(noise(weight.shape[0]), noise(weight.shape[1]) + 1)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a rotation": rotate,
    "dense noise": lambda w: w + 0.3 * w.std() * noise(*w.shape),
    "replaced": lambda w: w.std() * noise(*w.shape),
    "rank one": lambda w: w + 0.1 * w.std() * outer(w),
    "a constant": lambda w: w + 0.2 * w.std(),
    "a constant row": lambda w: w.index_add(0, torch.tensor([3]), torch.ones(1, w.shape[1])),
    "a constant column": lambda w: w.index_add(1, torch.tensor([3]), torch.ones(w.shape[0], 1)),
    "some rows": lambda w: w * torch.where(torch.arange(len(w)) % 50 == 7, 1.5, 1.0)[:, None],
    "one element": lambda w: w.index_put((torch.tensor(5), torch.tensor(6)), torch.tensor(3.0)),
    "stripes": lambda w: w + 0.1 * (torch.arange(w.shape[1]) % 2 - 0.5),
    "scaled": lambda w: 1.2 * w,
}


@pytest.mark.parametrize("mode", ["sketch", "exact"])
@pytest.mark.parametrize("change", CHANGES)
def test_matrices_that_moved(change: str, mode: drift_module.Mode) -> None:
    one = model()
    before = {name: parameter.detach().clone() for name, parameter in one.named_parameters()}
    drift = Drift(find_layers(one), mode)
    drift.begin()
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if parameter.dim() == 2 and "layers.3" not in name:
                parameter.copy_(CHANGES[change](parameter))
    found = read(drift)
    tolerance = TOLERANCE if mode == "sketch" else 1e-4
    values = found.layers[NAME]
    for layer in values:
        assert values[layer] == pytest.approx(exact(one, before, layer), rel=tolerance), layer
        if layer.startswith("layers.3"):
            assert values[layer] == 0
    assert found.scalars[f"{NAME}_max"] == max(values.values())
    assert found.scalars[f"{NAME}_mean"] == pytest.approx(sum(values.values()) / len(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["sketch", "exact"])
def test_negation_is_a_drift_of_two(mode: drift_module.Mode, dtype: torch.dtype) -> None:
    one = model(dtype)
    drift = Drift(find_layers(one), mode)
    drift.begin()
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.neg_()
    tolerance = TOLERANCE if mode == "sketch" else 1e-5
    assert list(read(drift).layers[NAME].values()) == pytest.approx([2.0] * 13, rel=tolerance)


@pytest.mark.parametrize("size", [1e-6, 1e-4])
def test_a_tiny_change_reads_as_one(size: float) -> None:
    """Sketches of nearby weights are subtracted: what rounding adds must stay below."""
    one = model()
    before = {name: parameter.detach().clone() for name, parameter in one.named_parameters()}
    drift = Drift(find_layers(one))
    drift.begin()
    assert set(read(drift).layers[NAME].values()) == {0.0}
    with torch.no_grad():
        for parameter in one.parameters():
            parameter += size * parameter.norm() * noise(*parameter.shape) / math.sqrt(parameter.numel())
    for layer, value in read(drift).layers[NAME].items():
        assert value == pytest.approx(exact(one, before, layer), rel=0.15), layer


def test_errors_are_as_stated() -> None:
    """Root mean square over layers and kinds of change, against 1/√(2C)."""
    errors = []
    for change in ("dense noise", "rank one", "replaced", "a constant"):
        one = model()
        before = {name: parameter.detach().clone() for name, parameter in one.named_parameters()}
        drift = Drift(find_layers(one))
        drift.begin()
        with torch.no_grad():
            for parameter in one.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(CHANGES[change](parameter))
        errors += [
            value / exact(one, before, layer) - 1
            for layer, value in read(drift).layers[NAME].items()
            if "norm" not in layer
        ]
    root = math.sqrt(sum(error**2 for error in errors) / len(errors))
    assert 0.5 * drift.relative_error < root < 1.5 * drift.relative_error < 0.04


def test_what_is_held_is_one_percent_at_most() -> None:
    one = model()
    size = sum(parameter.nbytes for parameter in one.parameters())
    drift = Drift(find_layers(one))
    drift.begin()
    read(drift)
    assert 0.004 * size < drift.nbytes <= max(0.005 * size, 1 << 16) <= 0.01 * size
    half = Drift(find_layers(one), model_bytes=2 * size)
    assert half.width > drift.width


def test_small_models_are_exact() -> None:
    torch.manual_seed(0)
    one = nn.Linear(40, 30)
    drift = Drift(find_layers(one))
    drift.begin()
    with torch.no_grad():
        one.weight.neg_()
        one.bias.neg_()
    assert read(drift).scalars[f"{NAME}_max"] == pytest.approx(2.0, rel=1e-6)


def test_widths_are_primes_that_fit() -> None:
    assert widest_within([100, 100, 10], 150) == 67
    assert widest_within([67 * 3, 100, 10], 144) == 61  # 67 divides a length
    assert widest_within([10], 1e9) == 16381


def test_fused_parts_move_by_themselves() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    one = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=4, n_embd=128, vocab_size=64, n_positions=16))
    drift = Drift(find_layers(one))
    drift.begin()
    with torch.no_grad():
        one.transformer.h[0].attn.c_attn.weight[:, 128:256].neg_()
    values = read(drift).layers[NAME]
    moved = values.pop("transformer.h.0.attn.c_attn[k]")
    assert moved == pytest.approx(2.0, rel=TOLERANCE) and set(values.values()) == {0.0}


def test_weights_that_began_at_zero_have_no_drift() -> None:
    one = model()
    nn.init.zeros_(one.embed.weight)
    drift = Drift(find_layers(one))
    drift.begin()
    nn.init.ones_(one.embed.weight)
    found = read(drift)
    assert "embed" not in found.layers[NAME] and "zero" in found.unavailable[f"{NAME}/embed"]
    assert math.isfinite(found.scalars[f"{NAME}_max"])


def test_non_finite_weights_are_told_as_they_are() -> None:
    one = model()
    drift = Drift(find_layers(one))
    drift.begin()
    with torch.no_grad():
        one.embed.weight[3, 3] = math.nan
    found = read(drift)
    assert math.isnan(found.layers[NAME]["embed"]) and math.isnan(found.scalars[f"{NAME}_max"])
    assert found.layers[NAME]["layers.0.up"] == 0


@pytest.mark.parametrize("mode", ["sketch", "exact"])
def test_after_a_resume_training_began_at_the_first_start(mode: drift_module.Mode, tmp_path: Path) -> None:
    one = model()
    first = Drift(find_layers(one), mode)
    first.begin()
    torch.save(first.state_dict(), tmp_path / "state.pt")
    with torch.no_grad():
        for parameter in one.parameters():
            parameter *= 1.5
    second = Drift(find_layers(one), mode)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    second.begin()
    assert read(second).layers == read(first).layers
    assert read(second).scalars[f"{NAME}_max"] == pytest.approx(0.5, rel=TOLERANCE)


def test_a_tensor_of_another_size_after_a_resume_is_unknown() -> None:
    one = model()
    first = Drift(find_layers(one))
    first.begin()
    state = first.state_dict()
    one.embed = nn.Embedding(900, 256)
    second = Drift(find_layers(one))
    second.load_state_dict(state)
    second.begin()
    found = read(second)
    assert "embed" not in found.layers[NAME] and f"{NAME}/embed" in found.unavailable
    assert len(found.layers[NAME]) == 12


def test_states_that_do_not_fit_are_refused() -> None:
    layers = find_layers(model())
    first = Drift(layers)
    first.begin()
    state = first.state_dict()
    with pytest.raises(ConfigError, match="drift='sketch'"):
        Drift(layers, "exact").load_state_dict(state)
    with pytest.raises(ConfigError, match="another version"):
        Drift(layers).load_state_dict(state | {"signs": "0"})
    off = Drift(layers, "off")
    off.load_state_dict(state)
    off.begin()
    assert off.compute() == {} and read_off(off) == Values()


def read_off(drift: Drift) -> Values:
    return drift.decode({})


def test_layers_that_are_unfrozen_later_begin_then() -> None:
    one = model()
    one.embed.requires_grad_(False)
    drift = Drift(find_layers(one))
    drift.begin()
    with torch.no_grad():
        one.layers[0].up.weight.neg_()
    one.embed.requires_grad_(True)
    drift.follow(find_layers(one))
    with torch.no_grad():
        one.embed.weight *= 1.5
    values = read(drift).layers[NAME]
    assert values["embed"] == pytest.approx(0.5, rel=TOLERANCE)
    assert values["layers.0.up"] == pytest.approx(2.0, rel=TOLERANCE)


def test_random_numbers_are_not_touched() -> None:
    one = model()
    state = torch.get_rng_state()
    drift = Drift(find_layers(one))
    drift.begin()
    read(drift)
    assert torch.equal(state, torch.get_rng_state())
