"""Alarms that begin together, told as one incident with the likely origin first.

Gradients flow from the output to the input, so a fault silences or inflates the layers before it: among
layers that departed alike, the one closest to the output is the likeliest origin. A departure that stands
out by itself outranks position.
"""

from __future__ import annotations

from dataclasses import dataclass

from palingenesis.events import Event

# Departures within this many decades of each other count as alike.
ALIKE = 0.5

# A missing gradient is a fact, an explosion has a cause of its own, a vanishing one is most often a
# consequence of either.
_FIRST = {"no_gradient": 0, "never_trained": 0, "exploding": 1, "vanishing": 2}


@dataclass(frozen=True)
class Alarmed:
    """One layer of an incident: its place in forward order and how far it departed, in decades."""

    layer: str
    order: int
    diagnosis: str
    departure: float


def rank(alarmed: list[Alarmed]) -> list[Alarmed]:
    """The alarms in order of how likely each layer is the origin."""
    largest = max((alarm.departure for alarm in alarmed if alarm.diagnosis == "exploding"), default=0.0)

    def key(alarm: Alarmed) -> tuple[int, float, int]:
        # Vanishing and missing layers are ordered by place alone: how small a silenced gradient is says
        # nothing about where it was silenced.
        below = round((largest - alarm.departure) / ALIKE) if alarm.diagnosis == "exploding" else 0
        return (_FIRST[alarm.diagnosis], below, -alarm.order)

    return sorted(alarmed, key=key)


def describe(step: int, identity: str, alarmed: list[Alarmed], depth: int) -> Event:
    """The ``incident`` event of alarms that began together.

    Args:
        step: the check's step.
        identity: the incident's id, which its alarms carry too.
        alarmed: the alarms, in any order.
        depth: how many layers are watched.
    """
    ranked = rank(alarmed)
    origin = ranked[0]
    alike = [alarm for alarm in ranked if _FIRST[alarm.diagnosis] == _FIRST[origin.diagnosis]]
    # A layer counts once, whether it or only one of its parameters is meant.
    names = list(dict.fromkeys(alarm.layer for alarm in ranked))
    if origin.diagnosis == "exploding" and round(origin.departure - alike[-1].departure, 1) > ALIKE:
        why = f"its gradient departed furthest, {10**origin.departure:,.0f} times its normal"
    elif len(alike) > 1:
        why = (
            "of the layers alike it is the closest to the output, and gradients flow from there to the input"
        )
    else:
        why = f"the only layer with {origin.diagnosis}"
    words = ", ".join(f"{_count(ranked, d)} {d}" for d in _FIRST if _count(ranked, d))
    return Event(
        "incident",
        step,
        "warning",
        f"{len(names)} of {depth} layers left their normal range together ({words}); "
        f"look first at {origin.layer}: {why}",
        {
            "incident": identity,
            "alarms": len(ranked),
            "layers": names,
            "diagnosis": origin.diagnosis,
            "origin": origin.layer,
            "why": why,
        },
    )


def _count(alarmed: list[Alarmed], diagnosis: str) -> int:
    return sum(alarm.diagnosis == diagnosis for alarm in alarmed)
