"""A check's reading against the layers' gradients themselves, in double precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.signals.exact import exact_norm
from torch import nn

from palingenesis.layers import Layers, Unit, find_layers
from palingenesis.signals.gradients import GradientReader
from palingenesis.watch.reading import CheckReading


class Model(nn.Module):
    """Layers of one unit, of two, of six in parts, and a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8, sparse=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = self.norm(x + self.attention(x, x, x)[0])
        out: torch.Tensor = self.head(x) * self.scale
        return out


def trained(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model()
    model(torch.randint(0, 9, (6, 5))).square().mean().backward()
    return model


def read(reader: GradientReader, step: int, scale: torch.Tensor | None = None) -> CheckReading:
    reader.look(step, scale)
    check = reader.send(step, {})
    return reader.decode(check, check.packet.arrays())


def exact_layers(layers: Layers) -> list[float]:
    """Each layer's norm from its parameters' dense gradients, joined."""
    found = []
    for layer in layers.names:
        pieces = []
        for unit in layers.units:
            if unit.layer != layer or unit.parameter.grad is None:
                continue
            gradient = unit.parameter.grad.to_dense()
            if unit.part is not None:
                axis, start, length = unit.part.dim, unit.part.start, unit.part.length
                gradient = gradient.split([start, length, gradient.shape[axis] - start - length], axis)[1]
            pieces.append(gradient.reshape(-1).double())
        found.append(exact_norm(torch.cat(pieces)) if pieces else 0.0)
    return found


@pytest.mark.parametrize("guard", [True, False])
def test_layer_norms(guard: bool) -> None:
    layers = find_layers(trained())
    reading = read(GradientReader(layers, guard=guard), 7)
    assert layers.names == (
        "scale",
        "table",
        "attention.in_proj[q]",
        "attention.in_proj[k]",
        "attention.in_proj[v]",
        "attention.out_proj",
        "norm",
        "head",
    )
    assert reading.step == 7
    assert reading.norm.tolist() == pytest.approx(exact_layers(layers), rel=1e-5, abs=0.0)
    assert not reading.absent.any()
    assert not reading.frozen.any()
    assert (reading.between is not None) == guard


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_layers_of_extreme_norms(scale: float) -> None:
    """The squares of the units' norms leave fp64; the layer's norm does not."""
    model = nn.Linear(3, 2).double()
    model.weight.grad = torch.full((2, 3), scale, dtype=torch.float64)
    model.bias.grad = torch.full((2,), scale, dtype=torch.float64)
    reading = read(GradientReader(find_layers(model), guard=True), 1)
    assert reading.norm.tolist() == pytest.approx([scale * math.sqrt(8)], rel=1e-12, abs=0.0)


def test_non_finite_units_make_their_layer_so_and_no_other() -> None:
    model = trained()
    assert model.head.bias.grad is not None
    assert model.norm.weight.grad is not None
    model.head.bias.grad[0] = math.inf
    model.norm.weight.grad[0] = math.nan
    layers = find_layers(model)
    reading = read(GradientReader(layers, guard=True), 1)
    bad = dict(zip(layers.names, reading.norm.tolist(), strict=True))
    assert bad.pop("head") == math.inf
    assert math.isnan(bad.pop("norm"))
    assert all(math.isfinite(norm) for norm in bad.values())


def test_absent_and_zero_are_told_apart() -> None:
    model = trained()
    model.head.weight.grad = model.head.bias.grad = None
    model.norm.weight.grad = None
    model.norm.bias.grad = torch.zeros(8)
    layers = find_layers(model)
    reading = read(GradientReader(layers, guard=True), 1)
    absent = {name for name, gone in zip(layers.names, reading.absent, strict=True) if gone}
    zero = {name for name, norm in zip(layers.names, reading.norm, strict=True) if norm == 0}
    assert absent == {"head"}
    assert zero == {"head", "norm"}
    assert reading.units is not None
    present = {u.name for u, now in zip(layers.units, reading.units.now, strict=True) if now}
    assert "norm.weight" not in present
    assert "scale" in present


def test_a_layer_is_frozen_when_all_of_it_is() -> None:
    model = trained()
    layers = find_layers(model)
    model.head.requires_grad_(False)
    model.norm.weight.requires_grad_(False)
    reading = read(GradientReader(layers, guard=True), 1)
    frozen = {name for name, off in zip(layers.names, reading.frozen, strict=True) if off}
    assert frozen == {"head"}


def test_the_loss_scale_is_taken_out() -> None:
    model = trained()
    layers = find_layers(model)
    reader = GradientReader(layers, guard=True)
    plain = read(reader, 1)
    scaled = read(reader, 2, torch.tensor(1024.0))
    np.testing.assert_allclose(scaled.norm, plain.norm / 1024.0)
    assert scaled.between is not None
    np.testing.assert_allclose(scaled.between.peak, read(reader, 3).between.peak / 1024.0)  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(
            st.sampled_from([None, 0.0, 1e-30, 0.5, 1.0, 3.0, 1e20, math.nan, math.inf]),
            min_size=4,
            max_size=4,
        ),
        min_size=1,
        max_size=6,
    )
)
def test_between_checks_like_a_loop_over_the_steps(steps: list[list[float | None]]) -> None:
    """Two layers of weight and bias: ``steps`` holds each one's only element at every step."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    layers = find_layers(model)
    parameters = list(model.parameters())
    reader = GradientReader(layers, guard=True)
    for step, values in enumerate(steps, start=1):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = None if value is None else torch.full_like(parameter, value)
        reader.look(step)
    check = reader.send(len(steps), {})
    reading = reader.decode(check, check.packet.arrays())
    assert reading.between is not None
    assert reading.between.steps == len(steps)
    for layer in range(2):
        norms = [[v or 0.0 for v in values[2 * layer : 2 * layer + 2]] for values in steps]
        finite = [(n, at) for at, pair in enumerate(norms, 1) for n in pair if 0 < n < math.inf]
        peak = max((n for n, _ in finite), default=0.0)
        bad = [at for at, pair in enumerate(norms, 1) if not all(map(math.isfinite, pair))]
        there = [at for at, pair in enumerate(norms, 1) if any(n != 0 for n in pair)]
        assert reading.between.peak[layer] == pytest.approx(peak, rel=1e-6, abs=0.0)
        # The step of the peak: of the first time that the unit which holds it reached it.
        reached = [at for n, at in finite if n == peak]
        assert reading.between.peak_step[layer] in (reached or [0])
        assert reading.between.first_nonfinite[layer] == (bad[0] if bad else 0)
        last = norms[-1]
        expected = math.hypot(*last) if all(map(math.isfinite, last)) else None
        if expected is None:
            assert not math.isfinite(reading.norm[layer])
        else:
            assert reading.norm[layer] == pytest.approx(expected, rel=1e-6, abs=0.0)
        assert reading.absent[layer] == all(v is None for v in steps[-1][2 * layer : 2 * layer + 2])
        assert reading.layers.last_present[layer] == (there[-1] if there else 0)
        assert reading.layers.now[layer] == any(n != 0 for n in last)


def test_each_check_starts_the_guard_afresh() -> None:
    model = trained()
    reader = GradientReader(find_layers(model), guard=True)
    for step in (1, 2):
        reader.look(step)
    first = read(reader, 3)
    for parameter in model.parameters():
        parameter.grad = None
    second = read(reader, 4)
    assert first.between is not None
    assert second.between is not None
    assert (first.between.steps, second.between.steps) == (3, 1)
    assert first.between.peak.all()
    assert not second.between.peak.any()


def test_what_is_sent_along_arrives() -> None:
    reader = GradientReader(find_layers(trained()), guard=True)
    reader.look(1)
    check = reader.send(1, {"losses": torch.tensor([1.0, 2.0])})
    assert check.packet.arrays()["losses"].tolist() == [1.0, 2.0]


def test_a_check_before_anything_was_looked_at_is_empty() -> None:
    reader = GradientReader(find_layers(trained()), guard=True)
    check = reader.send(1, {})
    reading = reader.decode(check, check.packet.arrays())
    assert not reading.norm.any()
    assert reading.between is None


def test_no_layers_at_all() -> None:
    reader = GradientReader(Layers((), (), (), ()), guard=True)
    reading = read(reader, 5)
    assert reading.norm.shape == (0,)
    assert not reading.saw_gradients


class _Somewhere:
    """A parameter as far as the reader looks at one. ``cpu:0`` and ``cpu`` stand in for two devices."""

    requires_grad = True

    def __init__(self, value: float, device: str) -> None:
        self.grad: torch.Tensor | None = torch.full((4,), value)
        self.device = torch.device(device)


def _layers_on(*devices: str) -> Layers:
    parameters: list[Any] = [_Somewhere(float(i + 1), device) for i, device in enumerate(devices)]
    names = tuple(chr(97 + i) for i in range(len(parameters)))
    units = tuple(Unit(p, f"{name}.weight", name) for p, name in zip(parameters, names, strict=True))
    return Layers(names, units, tuple(range(len(units))), ())


def test_layers_of_several_devices_come_back_in_order() -> None:
    layers = _layers_on("cpu", "cpu:0", "cpu", "cpu:0", "cpu:0")
    reader = GradientReader(layers, guard=True)
    reading = read(reader, 1)
    assert reading.norm.tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert reading.between is not None
    assert reading.between.peak.tolist() == reading.norm.tolist()


def test_a_model_that_is_moved_to_another_device_is_followed() -> None:
    """``model.to(device)`` after the monitor was made, with a check still on its way."""
    layers = _layers_on("cpu", "cpu:0", "cpu")
    reader = GradientReader(layers, guard=True)
    reader.look(1)
    late = reader.send(1, {})
    for unit in layers.units:
        unit.parameter.device = torch.device("cpu:0")  # type: ignore[misc]
    after = read(reader, 2)
    before = reader.decode(late, late.packet.arrays())
    assert before.norm.tolist() == after.norm.tolist() == [2.0, 4.0, 6.0]


def test_gradients_are_left_as_they_are() -> None:
    model = trained()
    before = [(p.grad, p.grad.clone(), p.grad._version) for p in model.parameters() if p.grad is not None]
    read(GradientReader(find_layers(model), guard=True), 1, torch.tensor(2.0))
    after = [p.grad for p in model.parameters() if p.grad is not None]
    for (kept, values, version), now in zip(before, after, strict=True):
        assert now is kept
        assert now._version == version
        assert torch.equal(now.to_dense(), values.to_dense())
