"""Symptoms in single layers: gradients that go missing, vanish or explode, and what nothing updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from palingenesis.events import Event
from palingenesis.findings.case import Case
from palingenesis.findings.finding import Finding


class _Alarms(NamedTuple):
    """Alarms of one kind."""

    layers: list[str]
    """In the order in which they rang; the likely origin of what began together first."""
    since: int
    over: list[str]
    """Those that came back into their range."""
    cause: str
    """What the monitor saw, in words; empty where it cannot tell."""

    @property
    def evidence(self) -> Mapping[str, Any]:
        return {"layers": self.layers, "step": self.since, "came_back": self.over}

    @property
    def told(self) -> str:
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        why = f" ({self.cause})" if self.cause else ""
        back = " until it came back" if self.layers[0] in self.over else ""
        return f"{self.layers[0]}{more}{why} from step {self.since} on{back}"


def _alarms(case: Case, diagnosis: str) -> _Alarms | None:
    rang = [event for event in case.events("alarm") if event.diagnosis == diagnosis and event.layer]
    if not rang:
        return None
    first = min(rang, key=_began)
    origins = [
        str(event.origin)
        for event in case.events("incident")
        if event.incident is not None and event.incident == first.incident
    ]
    named = [_name(event) for event in sorted(rang, key=_began)]
    origin = [name for name in named if name in origins]
    back = {
        _name(event)
        for event in case.events("alarm_cleared")
        if event.diagnosis == diagnosis and event.reason != "level_accepted"
    }
    layers = list(dict.fromkeys([*origin, *named]))
    return _Alarms(
        layers, _began(first), [layer for layer in layers if layer in back], str(first.cause or "")
    )


def _began(event: Event) -> int:
    return int(event.since) if isinstance(event.since, (int, float)) else event.step


def _name(event: Event) -> str:
    return f"{event.layer}.{event.parameter}" if event.parameter else str(event.layer)


def never_trained(case: Case) -> Finding | None:
    alarms = _alarms(case, "never_trained")
    if alarms is None:
        return None
    return Finding(
        "run.never_trained",
        "warning",
        f"no gradient ever reached {alarms.told}, though an optimizer holds it",
        alarms.evidence,
        "take out what cuts these layers off the loss (detach(), no_grad(), an output that is not used); "
        "with train.gradient_checkpointing and adapters call enable_input_require_grads(), as pgs train "
        "does",
        since=1,
    )


def layer_stopped(case: Case) -> Finding | None:
    alarms = _alarms(case, "no_gradient")
    if alarms is None:
        return None
    frozen = [event for event in case.events("parameters_changed") if event.frozen]
    evidence = dict(alarms.evidence)
    if frozen:
        evidence["frozen_at"] = frozen[0].step
    return Finding(
        "run.layer_stopped",
        "warning",
        f"the gradient is gone in {alarms.told}",
        evidence,
        "take out what cuts the layer off at that step (requires_grad, detach(), a branch no longer taken); "
        "train.resume_from: a checkpoint from before it",
        since=alarms.since,
    )


def layer_vanishing(case: Case) -> Finding | None:
    alarms = _alarms(case, "vanishing")
    if alarms is None:
        return None
    return Finding(
        "run.layer_vanishing",
        "warning",
        f"the gradient fell to a tenth of its normal, or less, in {alarms.told}",
        alarms.evidence,
        f"train.learning_rate: {case.rate(1 / 3, 'a third')}, from a checkpoint of before that step "
        "(train.resume_from); look at the first layer named, and at what stands between it and the loss",
        since=alarms.since,
    )


def layer_exploding(case: Case) -> Finding | None:
    """Alarms, and spikes of single steps between two checks."""
    alarms = _alarms(case, "exploding")
    spikes = [event for event in case.events("gradient_spike") if event.severity != "info"]
    if alarms is None and not spikes:
        return None
    since = min([event.step for event in spikes] + ([alarms.since] if alarms else []))
    layers = list(dict.fromkeys([*_layers(spikes), *(alarms.layers if alarms else [])]))
    told = f"the gradient rose tenfold or more in {alarms.told}" if alarms else _spiked(spikes)
    return Finding(
        "run.layer_exploding",
        "warning",
        told,
        {"layers": layers, "step": since, "spikes": [event.step for event in spikes]},
        f"train.max_grad_norm: 1.0, and if it comes again train.learning_rate: {case.rate(1 / 3, 'a third')}",
        since=since,
    )


def _layers(events: Sequence[Event]) -> list[str]:
    return [str(layer) for event in events for layer in (event.layers or [event.layer]) if layer]


def _spiked(spikes: Sequence[Event]) -> str:
    first = spikes[0]
    times = f"{first.ratio:.3g} times its usual peak" if isinstance(first.ratio, (int, float)) else "far up"
    more = f", and {len(spikes) - 1} times more later" if len(spikes) > 1 else ""
    return f"the gradient of {first.layer} spiked to {times} at step {first.step}{more}"


def not_optimized(case: Case) -> Finding | None:
    """Parameters that train and that no optimizer holds, from the start or from some step on."""
    found = case.events("not_optimized")
    found += [
        event
        for event in case.events("parameters_changed")
        if event.not_optimized and event.severity != "info"
    ]
    if not found:
        return None
    first = min(found, key=lambda event: event.step)
    names = [str(name) for name in (first.parameters or first.not_optimized or [])]
    shown = names[0] if names else "a parameter"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Finding(
        "run.not_optimized",
        "warning",
        f"no optimizer holds {shown}{more}, from step {first.step} on: its gradients update nothing",
        {"parameters": names, "step": first.step},
        "make the optimizer after the last change to the model, from all of its parameters, or add what is "
        "new with optimizer.add_param_group()",
        since=first.step,
    )


def rank_outlier(case: Case) -> Finding | None:
    found = case.events("rank_outlier")
    if not found:
        return None
    first = found[0]
    ranks = sorted({event.rank for event in found if event.rank is not None})
    return Finding(
        "run.rank_outlier",
        "warning",
        f"the gradients of rank {first.rank} stand far apart from the other ranks' at step {first.step}, "
        f"first in {first.layer}",
        {"step": first.step, "ranks": ranks, "layer": first.layer, "events": len(found)},
        "look at what that rank trains on (its shard of data.dataset, its device); give every rank rows of "
        "the same kind, by a distributed sampler as pgs train has it",
        since=first.step,
    )


def no_gradients(case: Case) -> Finding | None:
    """The monitor was asked before there were gradients, or after they were cleared."""
    found = case.events("no_gradients")
    if not found:
        return None
    return Finding(
        "run.no_gradients",
        "warning",
        f"at step {found[0].step} no layer had a gradient when the monitor looked: what layers do was not "
        "seen",
        {"step": found[0].step, "watched": found[0].watched},
        "call mon.step(loss) after loss.backward() and before optimizer.zero_grad(set_to_none=True)",
        since=found[0].step,
    )
