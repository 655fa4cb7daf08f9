"""Parameters that are unfrozen, frozen, added, replaced or removed while a run goes on."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from palingenesis import Event, Monitor, load_run
from palingenesis.changes import Inventory, unwrap_optimizers
from palingenesis.errors import ConfigError

CHANGES = ("added", "removed", "replaced", "unfrozen", "frozen", "optimized")


def model_of(*frozen: str) -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"})
    for name in frozen:
        model[name].requires_grad_(False)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def inventory(
    model: nn.Module, *optimizers: torch.optim.Optimizer, patterns: tuple[str, ...] = ("*",)
) -> Inventory:
    return Inventory(model, list(optimizers), patterns)


def told(event: Event | None) -> dict[str, list[str]]:
    assert event is not None
    assert event.event == "parameters_changed"
    return {change: event.fields[change] for change in CHANGES if event.fields[change]}


# -- the inventory ----------------------------------------------------------------------------------------


def test_no_change_is_no_event() -> None:
    model = model_of("a")
    watched = inventory(model, sgd(model))
    layers = watched.layers
    for p in model.parameters():
        p.data.add_(1.0)
    assert watched.refresh(1) is None
    assert watched.layers is layers


def test_unfrozen() -> None:
    model = model_of("a", "b")
    watched = inventory(model, sgd(model))
    assert watched.layers.names == ("c",)
    model["a"].requires_grad_(True)
    event = watched.refresh(10)
    assert told(event) == {"unfrozen": ["a.weight", "a.bias"]}
    assert event is not None
    assert (event.step, event.severity) == (10, "info")
    assert watched.layers.names == ("a", "c")
    assert watched.refresh(20) is None


def test_unfrozen_but_in_no_optimizer_is_a_warning() -> None:
    """The usual mistake: the optimizer was made from the parameters that trained then."""
    model = model_of("a")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    watched = inventory(model, optimizer)
    model["a"].requires_grad_(True)
    event = watched.refresh(1)
    assert event is not None
    assert event.severity == "warning"
    assert event.not_optimized == ["a.weight", "a.bias"]
    assert "in no optimizer, so that nothing updates them: a.weight, a.bias" in event.message
    assert watched.trained().tolist() == [False, True, True]


def test_frozen_in_the_optimizer_stays_in_watch() -> None:
    """That is how a layer quietly stops training."""
    model = model_of()
    watched = inventory(model, sgd(model))
    model["b"].requires_grad_(False)
    assert told(watched.refresh(1)) == {"frozen": ["b.weight", "b.bias"]}
    assert watched.layers.names == ("a", "b", "c")
    model["b"].requires_grad_(True)
    assert told(watched.refresh(2)) == {"unfrozen": ["b.weight", "b.bias"]}


def test_frozen_and_out_of_the_optimizer_leaves_the_watch() -> None:
    model = model_of()
    optimizer = sgd(model)
    watched = inventory(model, optimizer)
    model["b"].requires_grad_(False)
    optimizer.param_groups[0]["params"] = [*model["a"].parameters(), *model["c"].parameters()]
    assert told(watched.refresh(1)) == {"frozen": ["b.weight", "b.bias"]}
    assert watched.layers.names == ("a", "c")
    assert dict(watched.layers.not_watched) == {"b": "frozen (requires_grad is off)"}


def test_frozen_first_and_taken_out_later() -> None:
    model = model_of()
    optimizer = sgd(model)
    watched = inventory(model, optimizer)
    model["b"].requires_grad_(False)
    watched.refresh(1)
    optimizer.param_groups[0]["params"] = [*model["a"].parameters(), *model["c"].parameters()]
    assert told(watched.refresh(2)) == {"removed": ["b.weight", "b.bias"]}
    assert watched.layers.names == ("a", "c")


def test_frozen_without_an_optimizer_given() -> None:
    model = model_of()
    watched = inventory(model)
    model["b"].requires_grad_(False)
    assert told(watched.refresh(1)) == {"frozen": ["b.weight", "b.bias"]}
    assert watched.layers.names == ("a", "c")


def test_all_frozen_is_an_event_and_no_error() -> None:
    model = model_of()
    watched = inventory(model)
    model.requires_grad_(False)
    assert len(told(watched.refresh(1))["frozen"]) == 6
    assert watched.layers.names == ()
    model["c"].requires_grad_(True)
    assert told(watched.refresh(2)) == {"unfrozen": ["c.weight", "c.bias"]}


def test_added_with_and_without_the_optimizer() -> None:
    model = model_of()
    optimizer = sgd(model)
    watched = inventory(model, optimizer)
    model["d"] = nn.Linear(3, 3, bias=False)
    event = watched.refresh(1)
    assert told(event) == {"added": ["d.weight"]}
    assert event is not None
    assert event.severity == "warning"
    model["e"] = nn.Linear(3, 3, bias=False)
    optimizer.add_param_group({"params": [*model["d"].parameters(), *model["e"].parameters()]})
    event = watched.refresh(2)
    assert told(event) == {"added": ["e.weight"], "optimized": ["d.weight"]}
    assert event is not None
    assert event.severity == "info"
    assert watched.trained().all()


def test_dropped_from_the_optimizer_while_it_trains() -> None:
    model = model_of()
    optimizer = sgd(model)
    watched = inventory(model, optimizer)
    del optimizer.param_groups[0]["params"][0]
    event = watched.refresh(1)
    assert event is not None
    assert (event.severity, event.not_optimized) == ("warning", ["a.weight"])
    assert not told(event)


def test_added_and_frozen_says_nothing() -> None:
    model = model_of()
    watched = inventory(model, sgd(model))
    model["d"] = nn.Linear(3, 3).requires_grad_(False)
    assert watched.refresh(1) is None


def test_replaced() -> None:
    model = model_of()
    watched = inventory(model, sgd(model))
    old = model["c"]
    model["c"] = nn.Linear(3, 7)
    event = watched.refresh(1)
    assert told(event) == {"replaced": ["c.weight", "c.bias"]}
    assert event is not None
    assert event.severity == "warning"
    held = {id(unit.parameter) for unit in watched.layers.units}
    assert id(old.weight) not in held
    assert id(model["c"].weight) in held


def test_removed() -> None:
    model = model_of()
    watched = inventory(model, sgd(model))
    del model["b"]
    event = watched.refresh(1)
    assert told(event) == {"removed": ["b.weight", "b.bias"]}
    assert event is not None
    assert event.severity == "info"


def test_wrapping_into_an_adapter() -> None:
    """The base weight moves below the adapter and stops training; the adapter is new."""
    model = model_of()
    watched = inventory(model, sgd(model))
    base = model["b"].requires_grad_(False)
    model["b"] = nn.ModuleDict({"base": base, "down": nn.Linear(3, 1, bias=False)})
    changed = told(watched.refresh(1))
    assert changed["added"][-1] == "b.down.weight"
    assert changed["removed"] == ["b.weight", "b.bias"]


def test_only_what_the_patterns_choose() -> None:
    model = model_of()
    watched = inventory(model, sgd(model), patterns=("a", "d*"))
    model["b"].requires_grad_(False)
    model["e"] = nn.Linear(3, 3)
    assert watched.refresh(1) is None
    model["d2"] = nn.Linear(3, 3)
    assert told(watched.refresh(2)) == {"added": ["d2.weight", "d2.bias"]}
    assert watched.layers.names == ("a", "d2")


def test_names_come_in_the_models_order() -> None:
    torch.manual_seed(0)
    names = [f"layer{i:02d}" for i in range(40)]
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    watched = inventory(model, sgd(model))
    model.requires_grad_(False)
    assert told(watched.refresh(1)) == {"frozen": [f"{name}.weight" for name in names]}


def test_lazy_parameters_are_noticed_when_they_come() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    watched = inventory(model, sgd(model))
    model(torch.zeros(2, 5))
    assert told(watched.refresh(1)) == {"added": ["0.weight", "0.bias"]}


def test_whatever_changes_the_layers_is_an_event() -> None:
    """Else the reader, which follows events, and the inventory would count different layers."""
    random = np.random.default_rng(0)
    model = model_of()
    optimizer = sgd(model)
    watched = inventory(model, optimizer)
    for step in range(300):
        before = [(unit.label, id(unit.parameter)) for unit in watched.layers.units]
        name = str(random.choice([*"abcdef"]))
        match int(random.integers(5)):
            case 0:
                model[name] = nn.Linear(3, 3).requires_grad_(bool(random.integers(2)))
            case 1 if name in model:
                del model[name]
            case 2 if name in model:
                model[name].requires_grad_(bool(random.integers(2)))
            case 3 if name in model:
                model[name].bias.requires_grad_(bool(random.integers(2)))
            case _:
                optimizer.param_groups[0]["params"] = [p for p in model.parameters() if random.random() < 0.7]
        event = watched.refresh(step)
        after = [(unit.label, id(unit.parameter)) for unit in watched.layers.units]
        assert event is not None or before == after
        if event is not None:
            assert any(event.fields[change] for change in (*CHANGES, "not_optimized"))


# -- optimizers -------------------------------------------------------------------------------------------


def test_optimizers_out_of_their_wrappers() -> None:
    model = model_of()
    first, second = sgd(model), sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(second, 1)
    assert unwrap_optimizers(None) == []
    assert unwrap_optimizers(first) == [first]
    assert unwrap_optimizers([first, (scheduler,)]) == [first, second]


def test_accelerates_wrapper_is_peeled_off() -> None:
    """It is an optimizer too, but the gradient scaler knows only the one inside."""
    accelerate = pytest.importorskip("accelerate")
    optimizer = sgd(model_of())
    try:
        wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
        assert isinstance(wrapped, torch.optim.Optimizer)
        assert unwrap_optimizers(wrapped) == [optimizer]
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("wrong", ["adam", 0.01, ["adam"], torch.optim.SGD, model_of().parameters()])
def test_something_else_is_one_line(wrong: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        unwrap_optimizers(wrong)
    assert "\n" not in str(raised.value)
    assert "torch.optim.Optimizer" in str(raised.value)


# -- through the monitor ----------------------------------------------------------------------------------


class Run:
    """Training of a, b and c in a row, checked at every step."""

    def __init__(self, *frozen: str, **options: Any) -> None:
        self.model = model_of(*frozen)
        self.optimizer = sgd(self.model)
        self.monitor = Monitor(self.model, self.optimizer, out=None, check_every=1, **options)

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = torch.randn(8, 3)
            for layer in self.model.values():
                x = layer(x).tanh() + x
            loss = x.square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.monitor.step(loss)
            self.optimizer.step()

    def events(self, name: str) -> list[Event]:
        return [event for event in self.monitor.events if event.event == name]


def test_a_layer_frozen_in_the_optimizer_rings_with_its_cause() -> None:
    run = Run()
    run.steps(15)
    run.model["b"].requires_grad_(False)
    run.steps(5)
    (changed,) = run.events("parameters_changed")
    assert told(changed) == {"frozen": ["b.weight", "b.bias"]}
    (alarm,) = run.events("alarm")
    assert (alarm.layer, alarm.diagnosis, alarm.cause) == ("b", "no_gradient", "requires_grad is off")
    assert not run.events("monitor_error")


def test_a_layer_frozen_and_taken_out_does_not_ring() -> None:
    run = Run()
    run.steps(15)
    run.model["b"].requires_grad_(False)
    run.optimizer.param_groups[0]["params"] = [p for p in run.model.parameters() if p.requires_grad]
    run.steps(10)
    assert not run.events("alarm")
    assert len(run.events("parameters_changed")) == 1


def test_layers_that_stay_keep_their_baselines() -> None:
    """The new one warms up by itself; the others are judged on."""
    run = Run()
    run.steps(15)
    run.model["d"] = nn.Linear(3, 3)
    run.optimizer.add_param_group({"params": list(run.model["d"].parameters())})
    run.steps(1)
    run.model["a"].requires_grad_(False)
    run.steps(2)
    assert [alarm.layer for alarm in run.events("alarm")] == ["a"]
    assert not run.events("monitor_error")


def test_everything_changes_while_training_goes_on(tmp_path: Any) -> None:
    """Whatever happens to the model, the record keeps one width a header and nothing fails."""
    run = Run("c")
    run.monitor = Monitor(run.model, run.optimizer, out=tmp_path / "run", check_every=1)
    run.steps(3)
    run.model["c"].requires_grad_(True)
    run.steps(3)
    run.model["b"] = nn.Linear(3, 3)
    run.optimizer.add_param_group({"params": list(run.model["b"].parameters())})
    run.steps(3)
    del run.model["a"]
    run.steps(3)
    run.model["z"] = nn.Linear(3, 3)
    run.steps(3)
    run.model.requires_grad_(False)
    run.model["z"].weight.requires_grad_(True)
    run.steps(3)
    run.monitor.close()
    assert not run.events("monitor_error")
    kinds = collections.Counter(
        change for event in run.events("parameters_changed") for change in told(event)
    )
    assert kinds == {"unfrozen": 1, "replaced": 1, "removed": 1, "added": 1, "frozen": 1}
    assert run.events("parameters_changed")[3].not_optimized == ["z.weight", "z.bias"]
    record = load_run(tmp_path / "run")
    assert record.verify().ok
    assert len(record.layers["step"]) == 18
    assert np.isnan(record.layers["c"][:3]).all()
    assert np.isfinite(record.layers["c"][3:15]).all()


@pytest.mark.parametrize("held", ["at first", "later", "never"])
def test_an_optimizer_that_takes_a_layer_in_later_makes_it_count_as_trained(held: str) -> None:
    """Such a layer without any gradient through the warm-up was never trained, and is told."""
    model = model_of()
    apart = list(model["c"].parameters())
    rest = [*model["a"].parameters(), *model["b"].parameters()]
    optimizer = torch.optim.SGD([*rest, *apart] if held == "at first" else rest, lr=0.01)
    monitor = Monitor(model, optimizer, out=None, check_every=1, warmup=4)
    for step in range(12):
        if step == 2 and held == "later":
            optimizer.add_param_group({"params": apart})
        optimizer.zero_grad()
        model["b"](model["a"](torch.randn(8, 3))).square().mean().backward()
        monitor.step()
        optimizer.step()
    alarms = [(event.layer, event.diagnosis) for event in monitor.events if event.event == "alarm"]
    assert alarms == ([] if held == "never" else [("c", "never_trained")])
