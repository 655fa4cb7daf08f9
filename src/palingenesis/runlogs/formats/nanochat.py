"""What nanochat prints::

    step 00010/05000 (1.23%) | loss: 2.345678 | lrm: 1.00 | dt: 12.34ms | tok/sec: 12,345 | mfu: 1.23
    Step 00250 | Validation bpb: 1.2345

Shows steps, time and tokens a second of all devices, evaluations in bits a byte (``other/validation_bpb``).
The loss is a moving average without its bias, so spikes are flattened and late; ``lrm`` is the learning rate
over its highest (``other/lrm``).
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed, cell_pairs
from palingenesis.runlogs.spelling import NUMBER, number

_LINE = re.compile(r"\bstep (\d{1,15})(?:/(\d{1,15}))? \(\d[\d.]{0,9}%\) \|(?=[^|]{0,20}loss)")
_EVALUATION = re.compile(rf"\b[Ss]tep (\d{{1,15}}) \| [Vv]alidation (bpb|loss): ({NUMBER})")


def _parse(text: str) -> Parsed | None:
    found = _LINE.search(text)
    if found is not None:
        row = cell_pairs(text[found.end() :])
        if "train/mfu" in row:
            row["train/mfu"] *= 1e-2
        places = ((names.STEP, found[1]), (names.TOTAL, found[2]))
        return Parsed({**row, **{name: float(part) for name, part in places if part}})
    found = _EVALUATION.search(text)
    value = number(found[3]) if found else None
    if found is None or value is None:
        return None
    column = names.EVAL_LOSS if found[2] == "loss" else "other/validation_bpb"
    return Parsed({names.STEP: float(found[1]), column: value})


FORMAT = LineFormat(
    "nanochat",
    _parse,
    marks=("step ", "Step "),
    thousands=True,
    loss_kind="moving_average",
    cannot_show=(
        "The loss is a moving average: spikes are flattened, and are seen late.",
        "Gradient norms are not in the log.",
    ),
)
