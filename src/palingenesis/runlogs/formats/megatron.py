"""What Megatron-LM prints, and what stands on it (Megatron-DeepSpeed, NeMo's Megatron)::

    [2026-01-01 00:00:00.0] iteration        1/     100 | consumed samples:           16 | elapsed time per
    iteration (ms): 1234.5 | learning rate: 1.000000E-04 | global batch size:    16 | lm loss: 1.085000E+01 |
    loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |
     validation loss at iteration 100 | lm loss value: 5.1E+00 | lm loss PPL: 1.7E+02 |

Shows iterations and how many there will be, loss, learning rate, gradient norm before clipping, loss scale,
skipped and NaN iterations, time an iteration, batch size, evaluations. The loss is the mean over the
iterations since the last line, and NaN iterations are left out of it.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed, cell_pairs

_LINE = re.compile(r"iteration\s{1,20}(\d{1,15})/\s{0,20}(\d{1,15})\s{0,4}\|")
_EVALUATION = re.compile(
    r"(?:validation|test) loss at (?:the end of training|iteration\s{1,9}(\d{1,15}))[^|]{0,80}\|"
)
_CELLS = {
    "lm loss": names.LOSS,
    "loss": names.LOSS,
    "number of skipped iterations": names.SKIPPED_NOW,
    "lm loss value": names.EVAL_LOSS,
    "lm loss PPL": "eval/ppl",
}
_MS = "elapsed time per iteration (ms)"


def _parse(text: str) -> Parsed | None:
    found = _LINE.search(text)
    if found is not None:
        row = cell_pairs(text[found.end() :], _NAMED)
        seconds = row.pop("ms", None)
        if seconds is not None:
            row["train/step_time_s"] = seconds * 1e-3
        return Parsed({names.STEP: float(found[1]), names.TOTAL: float(found[2]), **row})
    found = _EVALUATION.search(text)
    if found is None:
        return None
    row = cell_pairs(text[found.end() :], _NAMED)
    return Parsed({**({names.STEP: float(found[1])} if found[1] else {}), **row})


_NAMED = {**_CELLS, _MS: "ms"}

FORMAT = LineFormat(
    "megatron",
    _parse,
    marks=("iteration", "loss at"),
    loss_kind="interval_mean",
    cannot_show=("The loss is the mean since the line before, without iterations that gave NaN.",),
)
