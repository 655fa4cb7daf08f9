"""The weights' tier: which layers count, ends over layers, and layers that change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from palingenesis import Monitor, MonitorConfig
from palingenesis.layers import find_layers
from palingenesis.reading import Reading
from palingenesis.signals.packet import Packet
from palingenesis.tiers.weights import WeightTier

DRIFT, RANK = "health/weight_drift", "health/stable_rank"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "words": nn.Embedding(30, 12),
            "first": nn.Linear(12, 16),
            "second": nn.Linear(16, 12),
            "lm_head": nn.Linear(12, 30, bias=False),
        }
    )


def tier(model: nn.Module | None = None, drift: Any = "exact") -> WeightTier:
    model = net() if model is None else model
    return WeightTier(model, find_layers(model), drift, [])


def test_embeddings_and_heads_are_not_key() -> None:
    """By what they are, or by name."""
    found = tier()
    assert [found.is_key(layer) for layer in ("words", "first", "second", "lm_head")] == [
        False,
        True,
        True,
        False,
    ]


def test_ends_over_layers() -> None:
    layers = {
        RANK: {"words": 1.0, "first": 4.0, "second": 8.0, "lm_head": 2.0},
        DRIFT: {"words": 0.5, "first": 0.1, "second": 0.3},
    }
    assert tier().ends(layers) == pytest.approx(
        {
            f"{RANK}_min": 4.0, f"{RANK}_mean": 6.0,
            f"{DRIFT}_max": 0.5, f"{DRIFT}_mean": 0.3,
        }
    )  # fmt: skip


def test_no_layers_no_ends() -> None:
    assert tier().ends({}) == {}
    assert tier().ends({RANK: {"lm_head": 2.0}}) == {}


def test_ends_that_are_not_finite_show() -> None:
    found = tier().ends({RANK: {"first": np.nan, "second": 3.0}, DRIFT: {"first": np.inf, "second": 0.1}})
    assert np.isnan(found[f"{RANK}_min"]) and found[f"{DRIFT}_max"] == np.inf


@pytest.mark.parametrize("absent", [None, np.array([False, False, True, True, True, False])])
def test_blocks_without_gradients_have_no_ratio(absent: Any) -> None:
    """Where ``.grad`` does not tell who had one, hooks do."""
    model = net()
    found = tier(model)
    units = found.layers.units
    norms = torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    if absent is None:
        for i in (0, 1, 5):
            units[i].parameter.grad = torch.ones_like(units[i].parameter)
    sent = {**found.norms(), **found.gradients({torch.device("cpu"): norms}), **found.present(absent)}
    arrays = Packet(sent).arrays()
    (values,) = found.decode(arrays)
    ratios = values.layers["health/gw_ratio"]
    first = torch.cat([p.detach().double().flatten() for p in model["first"].parameters()])  # type: ignore[index]
    # Of `second` neither has a gradient, of `first` one has.
    assert ratios == pytest.approx(
        {
            "words": 1.0 / float(model["words"].weight.detach().double().norm()),  # type: ignore[index]
            "first": 2.0 / float(first.norm()),
            "lm_head": 4.0 / float(model["lm_head"].weight.detach().double().norm()),  # type: ignore[index]
        },
        rel=1e-6,
    )


# -- layers that change ------------------------------------------------------------------------------------


class Loop:
    """A watched model of which layers come and go.

    Args:
        options: of the config.
    """

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12))
        self.readings: list[Reading] = []
        self.options = {"check_every": 1, "tier3_every": 2, "drift": "exact", **options}

    def watch(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        config = MonitorConfig(**self.options)
        self.monitor = Monitor(
            self.model, self.optimizer, None, config=config, on_reading=self.readings.append
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(torch.randn(8, 12)).square().mean().backward()
            self.monitor.step()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def drifts(self) -> dict[str, float]:
        return dict(next(one for one in reversed(self.readings) if DRIFT in one.layers).layers[DRIFT])

    def weights(self) -> list[torch.Tensor]:
        return [torch.cat([p.detach().flatten() for p in layer.parameters()]) for layer in self.model]


@pytest.mark.parametrize("drift", ["exact", "sketch"])
def test_a_layer_that_is_unfrozen_before_the_first_step_drifts_too(drift: Any) -> None:
    loop = Loop(drift=drift)
    loop.model[1].requires_grad_(False)
    loop.watch()
    loop.model[1].requires_grad_(True)
    first = loop.weights()
    loop.steps(3)
    before_last = loop.weights()
    loop.steps(1)
    assert not [event for event in loop.monitor.events if event.event == "monitor_error"]
    assert set(loop.drifts()) == {"0", "1", "2"}
    moved = {
        str(i): float((one - before).norm() / before.norm())
        for i, (one, before) in enumerate(zip(before_last, first, strict=True))
    }
    assert loop.drifts() == pytest.approx(moved, rel=1e-4)


def test_a_layer_that_is_replaced_before_the_first_step() -> None:
    loop = Loop()
    loop.watch()
    loop.model[2] = nn.Linear(12, 4)
    loop.optimizer.add_param_group({"params": list(loop.model[2].parameters())})
    loop.steps(2)
    assert not [event for event in loop.monitor.events if event.event == "monitor_error"]
    assert set(loop.drifts()) == {"0", "1", "2"}
    assert 0 < loop.drifts()["2"] < 0.5  # from what it was at the first step, not from the one before it


def test_without_a_start_layers_that_come_have_no_drift_either() -> None:
    loop = Loop()
    loop.model[1].requires_grad_(False)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    config = MonitorConfig(**loop.options)
    loop.monitor = Monitor(
        loop.model, loop.optimizer, None, config=config, on_reading=loop.readings.append, start_step=100
    )
    loop.steps(2)
    loop.model[1].requires_grad_(True)
    loop.steps(4)  # up to step 106, at which tier 3 looks
    assert not [event for event in loop.monitor.events if event.event == "monitor_error"]
    assert not [one for one in loop.readings if DRIFT in one.layers]
    assert set(loop.readings[-1].layers[RANK]) == {"0", "1", "2"}
