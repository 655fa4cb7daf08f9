"""What cannot be had is told once for each signal and reason."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from palingenesis import Monitor, load_run
from palingenesis.tiers.missing import Missing

RANK = "health/stable_rank"


def test_once_for_each_signal_and_reason() -> None:
    missing = Missing()
    (event,) = missing.tell(10, {"health/gns": "no batch"})
    assert (event.event, event.step, event.severity) == ("signal_unavailable", 10, "info")
    assert (event.signal, event.reason, event.layers) == ("health/gns", "no batch", [])
    assert event.message == "health/gns cannot be had: no batch"
    assert missing.tell(20, {"health/gns": "no batch"}) == []
    assert [e.reason for e in missing.tell(20, {"health/gns": "another reason"})] == ["another reason"]
    assert [e.signal for e in missing.tell(20, {"health/other": "no batch"})] == ["health/other"]
    assert missing.tell(30, {"health/gns": "another reason", "health/other": "no batch"}) == []


def test_layers_with_one_reason_are_one_event() -> None:
    reasons = {f"{RANK}/h.{i}.attn": "every element is zero" for i in range(5)}
    (event,) = Missing().tell(1, reasons)
    assert event.signal == RANK
    assert event.layers == [f"h.{i}.attn" for i in range(5)]
    assert event.message == (
        f"{RANK} of h.0.attn, h.1.attn, h.2.attn and 2 more cannot be had: every element is zero"
    )
    (event,) = Missing().tell(1, dict(list(reasons.items())[:3]))
    assert "h.2.attn cannot be had" in event.message and "more" not in event.message


def test_two_reasons_of_one_signal_are_two_events() -> None:
    found = Missing().tell(1, {f"{RANK}/a": "zero", f"{RANK}/b": "not known yet", f"{RANK}/c": "zero"})
    assert [(event.reason, event.layers) for event in found] == [
        ("zero", ["a", "c"]),
        ("not known yet", ["b"]),
    ]


def test_reasons_that_differ_in_figures_are_one() -> None:
    missing = Missing()
    assert missing.tell(1, {"health/gns": "needs 8 steps, has seen 3"})
    assert missing.tell(2, {"health/gns": "needs 8 steps, has seen 4"}) == []
    assert missing.tell(3, {"health/gns": "needs 12.5 steps, has seen 10"}) == []


def test_nothing_is_missing() -> None:
    assert Missing().tell(1, {}) == []


def test_a_run_that_goes_on_does_not_tell_again(tmp_path: Path) -> None:
    """Learned from events as the record holds them."""
    model = nn.Linear(3, 3)
    with Monitor(model, out=tmp_path / "run") as monitor:
        for _ in range(20):
            model.weight.grad = torch.ones(3, 3)
            monitor.step(1.0)
    events = load_run(tmp_path / "run").events
    told = [event for event in events if event.event == "signal_unavailable"]
    assert {event.signal for event in told} >= {"health/token_efficiency", "health/padding_pct"}
    missing = Missing()
    missing.learn(events)
    assert missing.tell(30, {str(event.signal): str(event.reason) for event in told}) == []
    assert missing.tell(30, {"health/token_efficiency": "a new reason"})
