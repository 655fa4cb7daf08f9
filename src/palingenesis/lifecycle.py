"""The events of a run as a whole: its start, its end, and what could be said of it on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palingenesis.changes import Inventory
from palingenesis.events import Event
from palingenesis.journal import one_line
from palingenesis.record.format import RECORD_VERSION

#: Why there is no drift in a run that goes on without a record.
NO_RECORD = "the run goes on without a record, which would hold the weights that it was first started with"


def opening(name: str | None, step: int, inventory: Inventory, *, resuming: bool) -> list[Event]:
    """What is told before the first step; ``run_resumed`` comes when it is known where the run goes on."""
    events = [] if resuming else [started(name, step)]
    not_watched = inventory.layers.not_watched
    sharded = {layer: reason for layer, reason in not_watched if reason.startswith("sharded")}
    if sharded:
        events.append(sharded_layers(step, sharded))
    if stray := inventory.not_optimized():
        events.append(not_optimized(step, stray))
    return events


def started(name: str | None, step: int) -> Event:
    fields = {"record_version": RECORD_VERSION, "name": name}
    return Event("run_started", step, "info", f"run {name!r} started" if name else "run started", fields)


def resumed(step: int) -> Event:
    return Event("run_resumed", step, "info", f"the run goes on from step {step}", {"from_step": step})


def ended(step: int, error: BaseException | None, seal: Mapping[str, Any]) -> Event:
    """The last event; of an exception only its type and first line are kept.

    Args:
        step: the last step.
        error: what ended the run, if it did not complete.
        seal: digests of the files that the chain of events does not cover.
    """
    named = _name(error)
    told = f"the run ended after {step} steps" + (f" with {named}" if named else "")
    fields = {"reason": _reason(error), "error": named, "steps": step, **seal}
    return Event("run_ended", step, "warning" if named else "info", told, fields)


def end_of(step: int, error: BaseException | None, counts: Mapping[str, int]) -> dict[str, Any]:
    """What run.json says of a run's end."""
    return {"reason": _reason(error), "error": _name(error), "steps": step, "counts": dict(counts)}


def _reason(error: BaseException | None) -> str:
    return "completed" if error is None else "exception"


def _name(error: BaseException | None) -> str | None:
    return None if error is None else one_line(error)


def loss_reduced(step: int, shape: Sequence[int]) -> Event:
    message = f"the loss has shape {list(shape)}: its mean is recorded; pass one number to record another"
    return Event("loss_reduced", step, "info", message, {"shape": list(shape)})


def not_optimized(step: int, parameters: Sequence[str]) -> Event:
    more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
    return Event(
        "not_optimized",
        step,
        "warning",
        f"no optimizer holds {parameters[0]}{more}, though requires_grad is on: nothing updates them; add "
        "them to the optimizer, freeze them, or give the monitor all optimizers (or layers=)",
        {"parameters": list(parameters)},
    )


def clipped_gradients(step: int, norm: float) -> Event:
    message = f"gradients arrive clipped to norm {norm:.4g}; what clipping does to all layers is taken out"
    return Event("clipped_gradients", step, "info", message, {"norm": norm})


def sharded_layers(step: int, reasons: Mapping[str, str]) -> Event:
    """Layers whose gradients are sharded in a way that cannot be read, by name."""
    layers, reason = list(reasons), next(iter(reasons.values()))
    return Event(
        "signal_unavailable",
        step,
        "info",
        f"gradient norms of {len(layers)} layers are not read: {reason}",
        {"signal": "gradient_norm", "reason": reason, "layers": layers},
    )


def tier3_at_end(step: int, every: int) -> Event:
    message = (
        f"the run ends before the first look at its trained weights was due (every {every} steps): they are "
        f"looked at once, at step {step}; lower tier3_every to see them on the way"
    )
    return Event("tier3_at_end", step, "info", message, {"tier3_every": every})


def gradients_released(step: int) -> Event:
    message = (
        "gradients are freed inside backward: they are read by hooks, on the steps that are looked at; what "
        "happens between two checks is not seen, and drift begins after the first update "
        '(gradients="released" says so from the start)'
    )
    return Event("gradients_released", step, "info", message, {})
