"""A PEFT model under ``Monitor``: effective weights, against matrices that PEFT itself forms."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from palingenesis import Event, Monitor, MonitorConfig, load_run
from palingenesis.reading import Reading

DRIFT, RANK, PRODUCT = "health/weight_drift", "health/stable_rank", "health/lora_stable_rank"


class Net(nn.Module):
    """Two blocks with a matrix that gets adapters, and a layer that trains as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(24, 40), "down": nn.Linear(40, 24)}) for _ in range(2)
        )
        self.mix = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = x + block["down"](torch.tanh(block["up"](x)))
        found: torch.Tensor = self.mix(x)
        return found


ADAPTED = [f"base_model.model.h.{i}.{name}" for i in range(2) for name in ("up", "down")]
SAVED = "base_model.model.mix.modules_to_save.default"
OPTIONS: dict[str, Any] = {"check_every": 2, "tier2_every": 2, "tier3_every": 3}


def adapted(net: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["up", "down"], "modules_to_save": ["mix"]}
    return get_peft_model(net or Net(), LoraConfig(**{**given, **options}))


class Loop:
    """A loop that keeps copies of the model as it was when the monitor was called.

    Args:
        model: with adapters.
        out: of the record.
        resume: go on with it.
        options: of the config.
    """

    def __init__(self, model: Any, out: Path | None = None, *, resume: bool = False, **options: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
        self.readings: list[Reading] = []
        self.events: list[Event] = []
        self.kept: dict[int, Any] = {}
        self.monitor = Monitor(
            model,
            self.optimizer,
            out,
            resume=resume,
            config=MonitorConfig(**{**OPTIONS, **options}),
            on_reading=self.readings.append,
            on_event=self.events.append,
        )
        self.random = torch.Generator().manual_seed(1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            x = torch.randn(16, 24, generator=self.random)
            loss = (self.model(x) - torch.randn(16, 12, generator=self.random)).square().mean()
            loss.backward()
            self.kept[self.monitor.global_step + 1] = copy.deepcopy(self.model)
            self.monitor.step(loss)
            self.optimizer.step()

    def of(self, name: str) -> dict[int, Any]:
        found = {}
        for reading in self.readings:
            value = reading.scalars.get(name, reading.layers.get(name))
            if value is not None:
                found[reading.step] = value
        return found

    def reasons(self, name: str) -> dict[str, list[str]]:
        told = [e for e in self.events if e.event == "signal_unavailable" and e.signal == name]
        return {str(event.reason): list(event.layers) for event in told}


def base_and_change(model: Any, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    module = model.get_submodule(layer)
    base = module.base_layer.weight.detach().double()
    active = [name for name in module.active_adapters if name in module.lora_A]
    change = sum(module.get_delta_weight(name).double() for name in active)
    return base, change.detach()


def whole(model: Any, layer: str) -> torch.Tensor:
    module = model.get_submodule(layer)
    return torch.cat([module.weight.detach().double().flatten(), module.bias.detach().double()])


def exact_rank(matrix: torch.Tensor) -> float:
    values = torch.linalg.svdvals(matrix)
    return float(values.square().sum() / values[0].square())


def exact_drifts(model: Any, first: Any) -> dict[str, float]:
    found = {}
    for layer in ADAPTED:
        base, change = base_and_change(model, layer)
        found[layer] = float(change.norm() / base.norm())
    before, now = whole(first, SAVED), whole(model, SAVED)
    found[SAVED] = float((now - before).norm() / before.norm())
    return found


def exact_ranks(model: Any) -> dict[str, float]:
    found = {layer: exact_rank(sum(base_and_change(model, layer))) for layer in ADAPTED}  # type: ignore[arg-type]
    found[SAVED] = exact_rank(model.get_submodule(SAVED).weight.detach().double())
    return found


@pytest.fixture(scope="module")
def trained() -> Loop:
    loop = Loop(adapted())
    loop.steps(13)
    loop.monitor.close()
    return loop


LOOKS = [1, 3, 6, 9, 12]


def test_nothing_goes_wrong(trained: Loop) -> None:
    assert not [event for event in trained.events if event.event == "monitor_error"]
    assert list(trained.of(DRIFT)) == LOOKS


@pytest.mark.parametrize("step", LOOKS)
def test_drift_is_that_of_the_effective_weights(step: int, trained: Loop) -> None:
    found = trained.of(DRIFT)[step]
    exact = exact_drifts(trained.kept[step], trained.kept[1])
    # Of the adapters' own A and B there is none: A alone has hardly moved, and B began at zero.
    assert found == pytest.approx(exact, rel=1e-4, abs=1e-12)
    assert (min(exact.values()) == 0) == (step == 1)
    assert trained.of(f"{DRIFT}_max")[step] == pytest.approx(max(exact.values()), rel=1e-4, abs=1e-12)
    mean = sum(exact.values()) / len(exact)
    assert trained.of(f"{DRIFT}_mean")[step] == pytest.approx(mean, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("step", LOOKS)
def test_stable_rank_is_that_of_the_merged_weights(step: int, trained: Loop) -> None:
    found = trained.of(RANK)[step]
    exact = exact_ranks(trained.kept[step])
    assert found == pytest.approx(exact, rel=0.01)
    assert trained.of(f"{RANK}_min")[step] == pytest.approx(min(exact.values()), rel=0.01)
    assert trained.of(f"{RANK}_mean")[step] == pytest.approx(sum(exact.values()) / len(exact), rel=0.01)


def test_stable_rank_of_the_product(trained: Loop) -> None:
    found = trained.of(PRODUCT)
    assert list(found) == LOOKS[1:]  # before that B is zero
    (reason,) = trained.reasons(PRODUCT)
    assert "add nothing yet" in reason and trained.reasons(PRODUCT)[reason] == ADAPTED
    for step in LOOKS[1:]:
        exact = {layer: exact_rank(base_and_change(trained.kept[step], layer)[1]) for layer in ADAPTED}
        assert found[step] == pytest.approx(exact, rel=1e-4)
        assert max(exact.values()) <= 4
        assert trained.of(f"{PRODUCT}_min")[step] == pytest.approx(min(exact.values()), rel=1e-4)
        mean = sum(exact.values()) / len(exact)
        assert trained.of(f"{PRODUCT}_mean")[step] == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("saved_is_worst", [True, False])
def test_the_ends_are_over_adapted_and_whole_layers_together(saved_is_worst: bool) -> None:
    """Whichever of them has moved furthest, or is closest to collapse."""
    model = adapted()
    loop = Loop(model, tier3_every=2)
    loop.steps(1)
    with torch.no_grad():
        if saved_is_worst:
            model.get_submodule(SAVED).weight.copy_(3 * torch.outer(torch.ones(12), torch.ones(24)))
        else:
            up = model.get_submodule(ADAPTED[0])
            up.lora_B["default"].weight.copy_(torch.outer(torch.ones(40), torch.ones(4)))
            up.lora_A["default"].weight.copy_(torch.outer(torch.ones(4), torch.ones(24)))
    loop.steps(1)
    worst = SAVED if saved_is_worst else ADAPTED[0]
    drifts, ranks = loop.of(DRIFT)[2], loop.of(RANK)[2]
    assert max(drifts, key=drifts.get) == min(ranks, key=ranks.get) == worst
    assert (
        loop.of(f"{DRIFT}_max")[2]
        == drifts[worst]
        == pytest.approx(exact_drifts(loop.kept[2], loop.kept[1])[worst], rel=1e-4)
    )
    assert (
        loop.of(f"{RANK}_min")[2] == ranks[worst] == pytest.approx(exact_ranks(loop.kept[2])[worst], rel=0.01)
    )
    # And what is said of it says where.
    (crossed,) = [e for e in loop.events if e.event == "bound_crossed" and e.diagnosis == "stable_rank"]
    assert worst in crossed.message


def test_gradients_and_norms_are_the_adapters_own(trained: Loop) -> None:
    """What trains is what is checked: here the effective weights have no say."""
    model = trained.kept[6]
    found = trained.of("health/weight_norm")[6]
    for block in ("base_model.model.h.0", "base_model.model.h.1", "base_model.model"):
        own = [
            p.detach().double().flatten()
            for name, p in model.named_parameters()
            if p.requires_grad and name.startswith(f"{block}.") and (".h." in name) == (".h." in block)
        ]
        assert found[block] == pytest.approx(float(torch.cat(own).square().mean().sqrt()), rel=1e-5)
    layers = load_names(trained)
    assert {name.split(".")[-2] for name in layers if "lora" in name} == {"lora_A", "lora_B"}


def load_names(loop: Loop) -> list[str]:
    return list(loop.monitor._inventory.layers.names)


@pytest.mark.parametrize("drift", ["exact", "off"])
def test_other_ways_of_drift(drift: Any) -> None:
    """Adapters know their own base weights: that needs no memory of the start."""
    loop = Loop(adapted(), drift=drift)
    loop.steps(6)
    exact = exact_drifts(loop.kept[6], loop.kept[1])
    if drift == "off":
        del exact[SAVED]
    assert loop.of(DRIFT)[6] == pytest.approx(exact, rel=1e-4)


# -- what has no number ------------------------------------------------------------------------------------


def test_what_is_more_than_a_product_has_no_number_and_a_reason() -> None:
    loop = Loop(adapted(use_dora=True))
    loop.steps(3)
    for name in (DRIFT, PRODUCT, RANK):
        (reason,) = loop.reasons(name)
        assert "DoRA" in reason and loop.reasons(name)[reason] == ADAPTED
    assert set(loop.of(DRIFT)[3]) == {SAVED} == set(loop.of(RANK)[3])
    assert loop.of(f"{RANK}_min")[3] == loop.of(RANK)[3][SAVED]


def test_adapters_that_are_merged_on_the_way() -> None:
    loop = Loop(adapted())
    loop.steps(3)
    loop.model.merge_adapter()
    loop.steps(3)
    loop.model.unmerge_adapter()
    loop.steps(3)
    assert set(loop.of(DRIFT)[3]) == {*ADAPTED, SAVED} and set(loop.of(DRIFT)[6]) == {SAVED}
    assert "merged" in next(iter(loop.reasons(DRIFT)))
    exact = exact_drifts(loop.kept[9], loop.kept[1])
    assert loop.of(DRIFT)[9] == pytest.approx(exact, rel=1e-4)


def test_adapters_that_are_added_on_the_way() -> None:
    """A layer that trained as a whole gets a frozen base and adapters."""
    torch.manual_seed(0)
    net = Net()
    loop = Loop(net)
    loop.steps(3)
    assert set(loop.of(DRIFT)[3]) == {"h.0.up", "h.0.down", "h.1.up", "h.1.down", "mix"}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["up", "down"])
    get_peft_model(net, config)  # in place: the monitor's model has the adapters too
    loop.optimizer.add_param_group({"params": [p for n, p in net.named_parameters() if "lora" in n]})
    loop.steps(6)
    assert not [event for event in loop.events if event.event == "monitor_error"]
    found = loop.of(DRIFT)[9]
    for name in ("h.0.up", "h.0.down", "h.1.up", "h.1.down"):
        base, change = base_and_change(loop.kept[9], name)
        assert found[name] == pytest.approx(float(change.norm() / base.norm()), rel=1e-4)
    assert not [name for name in found if "lora" in name]


def test_two_adapters_at_once() -> None:
    model = adapted(modules_to_save=None)
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=2, target_modules=["up"]))
    model.base_model.set_adapter(["default", "second"])
    loop = Loop(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    loop.steps(3)
    for layer in ADAPTED:
        base, change = base_and_change(loop.kept[3], layer)
        assert loop.of(DRIFT)[3][layer] == pytest.approx(float(change.norm() / base.norm()), rel=1e-4)
        assert loop.of(RANK)[3][layer] == pytest.approx(exact_rank(base + change), rel=0.01)
        assert loop.of(PRODUCT)[3][layer] == pytest.approx(exact_rank(change), rel=1e-4)
    assert set(loop.of(DRIFT)[3]) == set(ADAPTED)


# -- resume ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drift", ["sketch", "exact"])
@pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint", "record alone"])
def test_a_resumed_run(drift: Any, checkpoint: bool, tmp_path: Path) -> None:
    first = Loop(adapted(), tmp_path / "run", drift=drift)
    first.steps(7)
    state = first.monitor.state_dict()
    first.monitor.close()
    model = adapted()
    model.load_state_dict(first.model.state_dict())
    again = Loop(model, tmp_path / "run", resume=True, drift=drift)
    if checkpoint:
        again.monitor.load_state_dict(state)
    again.steps(6)
    again.monitor.close()
    assert not [event for event in again.events if event.event == "monitor_error"]
    assert list(again.of(DRIFT)) == [8, 9, 12]
    for step in (8, 9, 12):
        exact = exact_drifts(again.kept[step], first.kept[1])
        assert again.of(DRIFT)[step] == pytest.approx(exact, rel=1e-4)
        assert again.of(f"{DRIFT}_max")[step] == pytest.approx(max(exact.values()), rel=1e-4)
        assert again.of(RANK)[step] == pytest.approx(exact_ranks(again.kept[step]), rel=0.01)
        assert set(again.of(PRODUCT)[step]) == set(ADAPTED)
    run = load_run(tmp_path / "run")
    assert run.verify().ok
    assert f"{DRIFT}/{SAVED}" in run.metrics and f"{PRODUCT}/{ADAPTED[0]}" in run.metrics


def test_only_what_drift_needs_is_kept(tmp_path: Path) -> None:
    """Of the adapters' layers the base weight is there already."""
    loop = Loop(adapted(), tmp_path / "run", drift="exact")
    loop.steps(1)
    loop.monitor.close()
    kept = torch.load(tmp_path / "run" / "start.pt", weights_only=True)["start"]
    assert set(kept) == {f"{SAVED}.weight", f"{SAVED}.bias"}
