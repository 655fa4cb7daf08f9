"""Configurations as flat lists of names and values, to be shown and to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palingenesis.report.words import visible

_LONG = 300


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted name; what is empty is a value too."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{full}.")
        else:
            found[full] = value
    return found


def option_value(value: Any) -> str:
    """A value of a configuration as people read it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return visible(", ".join(option_value(item) for item in value), _LONG) or "none"
    return f"{value:.10g}" if isinstance(value, (int, float)) else visible(value, _LONG)


def training_rows(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is told of the training loop: what all loops have first, then the loop's own options."""
    return [(visible(name), option_value(value)) for name, value in flat(training).items()]
