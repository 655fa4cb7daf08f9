"""What nanoGPT prints::

    iter 0: loss 2.7512, time 30728.83ms, mfu -100.00%
    step 0: train loss 2.2365, val loss 1.9580

Shows iterations, loss of one micro-batch, time, evaluations on both splits. Lacks learning rate and gradient
norm; the loss of a line is that of one micro-batch, so it is noisier than that of the step.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.spelling import NUMBER, number

_LINE = re.compile(rf"\biter (\d{{1,15}}): loss ({NUMBER})(?:, time ({NUMBER})ms)?(?:, mfu ({NUMBER})%)?")
_EVALUATION = re.compile(rf"\bstep (\d{{1,15}}): train loss ({NUMBER}), val loss ({NUMBER})")
_COLUMNS = ((names.STEP, 1.0), (names.LOSS, 1.0), ("train/step_time_s", 1e-3), ("train/mfu", 1e-2))
_EVAL_COLUMNS = ((names.STEP, 1.0), ("other/train loss of the evaluation", 1.0), (names.EVAL_LOSS, 1.0))


def _parse(text: str) -> Parsed | None:
    found: re.Match[str] | None = _LINE.search(text)
    columns: tuple[tuple[str, float], ...] = _COLUMNS
    if found is None:
        found, columns = _EVALUATION.search(text), _EVAL_COLUMNS
    if found is None:
        return None
    row = {}
    for (name, factor), part in zip(columns, found.groups(), strict=True):
        value = number(part) if part else None
        if value is not None and not (name == "train/mfu" and value < 0):  # -100: not known yet
            row[name] = value * factor
    return Parsed(row)


FORMAT = LineFormat(
    "nanogpt",
    _parse,
    marks=(": loss ", ": train loss "),
    loss_kind="step",
    cannot_show=(
        "A loss is of one micro-batch, noisier than the step's.",
        "Learning rate and gradient norm are not in the log.",
    ),
)
