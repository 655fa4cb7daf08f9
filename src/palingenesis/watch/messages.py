"""The sentences and fields of layer events: what a person reads when an alarm fires."""

from __future__ import annotations

import dataclasses
from typing import Any

from palingenesis.events import Event
from palingenesis.watch.reading import CheckReading


def with_fields(event: Event, **fields: Any) -> Event:
    """The same event with more fields."""
    return dataclasses.replace(event, fields={**event.fields, **fields})


def alarm(
    layer: str,
    diagnosis: str,
    reading: CheckReading,
    *,
    index: int,
    value: float,
    baseline: float | None,
    std: float,
    relative: float,
    since: int,
    clipped: bool,
) -> Event:
    """The ``alarm`` event of one layer.

    Args:
        layer: its name.
        diagnosis: ``no_gradient``, ``vanishing``, ``exploding`` or ``never_trained``.
        reading: the check that confirmed it.
        index: the layer's place in the reading.
        value: log₁₀ norm now (NaN where there is none).
        baseline: mean log₁₀ norm in the layer's recent history, if there is one.
        std: its standard deviation.
        relative: distance from the baseline in decades, the common factor taken out.
        since: step of the first check with this condition.
        clipped: gradients reached the monitor clipped, and the distance is relative to the other layers.
    """
    cause = _cause(reading, index) if diagnosis in ("no_gradient", "never_trained") else None
    if diagnosis == "never_trained":
        told = f"no gradient at any check since training began: {cause}"
    elif diagnosis == "no_gradient":
        normal = f"; its normal is {10**baseline:.3g}" if baseline is not None else ""
        told = f"no gradient any more: {cause}{normal}"
    else:
        way = "below" if diagnosis == "vanishing" else "above"
        told = (
            f"gradient {diagnosis}: norm {10**value:.3g}, {10 ** abs(relative):,.0f} times {way} its normal "
            f"{10 ** (baseline or 0.0):.3g}"
        )
        if clipped:
            told += " once clipping's common factor is taken out"
    has_range = diagnosis in ("vanishing", "exploding")
    return Event(
        "alarm",
        reading.step,
        "warning",
        f"{layer}: {told} (since step {since})",
        {
            "layer": layer,
            "diagnosis": diagnosis,
            "value": value if has_range else None,
            "baseline": baseline,
            "std": std if baseline is not None else None,
            "sigma": abs(relative) / std if has_range and std > 0 else None,
            "relative": relative if has_range else None,
            "since": since,
            "cause": cause,
        },
    )


def _cause(reading: CheckReading, index: int) -> str:
    if reading.frozen[index]:
        return "requires_grad is off"
    if reading.absent[index]:
        return "the gradient is None (detached, or not used in the forward pass)"
    return "every element of the gradient is exactly zero"


def parameter_alarm(layer: str, parameter: str, diagnosis: str, step: int, since: int) -> Event:
    """The ``alarm`` event of one parameter in a layer whose other parameters do have a gradient."""
    if diagnosis == "never_trained":
        told, since = "has had no gradient at any check since training began", 1
    else:
        told = "has no gradient any more"
    return Event(
        "alarm",
        step,
        "warning",
        f"{layer}: {parameter} {told}, though the layer's other parameters do (since step {since})",
        {"layer": layer, "diagnosis": diagnosis, "parameter": parameter, "since": since},
    )


def alarm_cleared(
    layer: str,
    diagnosis: str,
    step: int,
    since: int,
    *,
    value: float | None = None,
    baseline: float | None = None,
    reason: str = "in_range",
    parameter: str | None = None,
) -> Event:
    """The ``alarm_cleared`` event: back in range, or the new level accepted as normal."""
    subject = f"{layer}: {parameter}" if parameter else layer
    told = "back in range" if reason == "in_range" else "its new level is accepted as normal"
    fields: dict[str, Any] = {"layer": layer, "diagnosis": diagnosis, "since": since, "reason": reason}
    if parameter:
        fields["parameter"] = parameter
    else:
        fields |= {"value": value, "baseline": baseline}
    return Event(
        "alarm_cleared", step, "info", f"{subject}: {diagnosis} over, {told} (alarm of step {since})", fields
    )


def level_shift(layer: str, step: int, old: float, new: float) -> Event:
    """The ``level_shift`` event: a lasting new level becomes the baseline."""
    return Event(
        "level_shift",
        step,
        "info",
        f"{layer}: its gradient norm has stayed near {10**new:.3g} (before: {10**old:.3g}); "
        "that is its normal from now on",
        {"layer": layer, "value": new, "baseline": old},
    )


def unconfirmed(step: int, diagnoses: dict[str, str], moved: float | None) -> list[Event]:
    """The ``unconfirmed`` event: the run ended before a second check could confirm what the last one saw.

    Args:
        step: the run's last step.
        diagnoses: layers out of range at the last check, and how.
        moved: how far (decades) all layers together were from their level, if they were.
    """
    told = []
    if diagnoses:
        first, diagnosis = next(iter(diagnoses.items()))
        more = f" and {len(diagnoses) - 1} more" if len(diagnoses) > 1 else ""
        told.append(f"{first} ({diagnosis}){more} left the normal range")
    if moved is not None:
        told.append(f"all layers moved by a factor of {10 ** abs(moved):,.0f}")
    if not told:
        return []
    message = f"at the last check {' and '.join(told)}; the run ended before a second check could confirm it"
    fields = {"layers": list(diagnoses), "diagnoses": diagnoses, "value": moved}
    return [Event("unconfirmed", step, "warning", message, fields)]
