"""What a tracker is: somewhere numbers go besides the record."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from palingenesis.errors import MissingExtraError
from palingenesis.record.format import NON_FINITE, STEP_KEY, number

#: When a row was made; a field of the row in the record, and no metric.
TIME_KEY = "time"


class Row(NamedTuple):
    """The numbers of one step."""

    step: int
    time: float  # seconds since the epoch
    values: Mapping[str, float]


class Tracker(Protocol):
    """One backend. Every method may raise, and may take for ever: it is called from a thread of its own.

    Attributes:
        name: what ``pgs sync --to`` calls it.
        where: where the run is to be seen, once it is open.
    """

    name: str
    where: str

    def open(self, run_id: str, name: str, config: Mapping[str, Any]) -> Mapping[str, int]:
        """Start the run of this id, or go on with it.

        Returns:
            For each metric that the backend holds of this run, the last step it has.
        """

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add the numbers of one step."""

    def close(self) -> None:
        """Write what waits, and end."""


def need(module: str, package: str | None = None) -> Any:
    """A module of the extra ``trackers``.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{package or module} cannot be imported ({error}): install it with "
            "pip install 'palingenesis[trackers]', or do without this tracker"
        ) from None


def metric_values(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row. Non-finite ones may be spelled as the record spells them; texts are left out."""
    return {
        key: found
        for key, value in row.items()
        if key not in (STEP_KEY, TIME_KEY) and (found := _number(value)) is not None
    }


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if isinstance(value, (int, float)):
        return number(value)
    # numpy registers its scalars as real numbers.
    return float(value) if isinstance(value, numbers.Real) else None


def last_steps(held: dict[str, int], step: int, keys: Mapping[str, Any]) -> None:
    """Note that a row of these keys is held."""
    for key in keys:
        if held.get(key, step) <= step:
            held[key] = step
