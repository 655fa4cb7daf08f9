"""Tables made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palingenesis.runlogs.table import Column, RunLog

Values = Sequence[float] | np.ndarray


def made(loss: Values, step: Values | None = None, **columns: Values | Mapping[str, Any]) -> RunLog:
    """A log with a row a loss.

    Args:
        loss: of every row, the column ``train/loss``. step: of every row; by default 1, 2, 3, … columns: more
        columns of the same length, NaN where a row has none: ``lr``, ``grad_norm`` and so on stand
            for ``train/…``, ``eval_loss`` for ``eval/loss``; any other name goes in as ``**{"health/…": …}``.
            What is a field of a ``RunLog`` (``total_steps=100``, ``events=…``) is taken as that.
    """
    steps = np.arange(1, len(loss) + 1, dtype=np.float64) if step is None else np.asarray(step, np.float64)
    fields = {name: columns.pop(name) for name in list(columns) if name in RunLog.__dataclass_fields__}
    built = {"train/loss": _column(steps, loss, keep_nan=True)}
    for name, values in columns.items():
        full = name if "/" in name else "eval/loss" if name == "eval_loss" else f"train/{name}"
        built[full] = _column(steps, values, keep_nan=False)  # type: ignore[arg-type]
    known: dict[str, Any] = {"source": "made", "format": "made", "lines": len(loss), **fields}
    return RunLog(columns=built, rows=len(loss), **known)


def _column(steps: np.ndarray, values: Values, *, keep_nan: bool) -> Column:
    numbers = np.asarray(values, np.float64)
    keep = np.ones(len(numbers), np.bool_) if keep_nan else ~np.isnan(numbers)
    return Column(np.flatnonzero(keep), steps[keep], numbers[keep])
