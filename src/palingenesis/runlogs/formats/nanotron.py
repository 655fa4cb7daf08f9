"""What nanotron prints::

    iteration: 1 / 100 | consumed_tokens: 1.02K | elapsed_time_per_iteration_ms: 1.5K | tokens_per_sec: 12.3K
    | tokens_per_sec_per_gpu: 1.5K | global_batch_size: 8 | lm_loss: 11.5 | lr: 0.0003 | grad_norm: 2.3

Shows iterations and how many there will be, loss, learning rate, gradient norm, speed, tokens. Numbers have
three digits and K, M, G behind: a loss of 11.5 may be 11.45 or 11.55.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed, cell_pairs

_LINE = re.compile(r"iteration: ([\d.]{1,15}[KMBG]?) / ([\d.]{1,15}[KMBG]?)\s{0,4}\|")
_NAMED = {"tokens_per_sec": "train/tokens_per_sec_global", "elapsed_time_per_iteration_ms": "ms"}


def _parse(text: str) -> Parsed | None:
    from palingenesis.runlogs.spelling import number

    found = _LINE.search(text)
    if found is None:
        return None
    row = cell_pairs(text[found.end() :], _NAMED)
    milliseconds = row.pop("ms", None)
    if milliseconds is not None:
        row["train/step_time_s"] = milliseconds * 1e-3
    places = {names.STEP: number(found[1]), names.TOTAL: number(found[2])}
    return Parsed({**{name: value for name, value in places.items() if value is not None}, **row})


FORMAT = LineFormat(
    "nanotron",
    _parse,
    marks=("iteration: ",),
    loss_kind="step",
    cannot_show=("Numbers are written with three digits: small changes of the loss are hidden.",),
)
