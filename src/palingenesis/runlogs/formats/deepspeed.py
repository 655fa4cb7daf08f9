"""What DeepSpeed prints by itself::

    [2026-01-01 00:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05],
    mom=[(0.9, 0.999)]                                                                 on the same line
    steps: 10 loss: 2.3456 iter time (s): 0.123 samples/sec: 65.0                       the pipeline engine
    [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempting loss scale: 65536, reducing to 32768.0

Shows steps, skipped steps so far, the learning rate of the first group, overflows; the pipeline engine also
loss and time. Other engines leave the loss to the training script: its lines are read if they are of another
known format.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.spelling import NUMBER, number

_STEP = re.compile(rf"\bstep=(\d{{1,15}}), skipped=(\d{{1,15}}), lr=\[({NUMBER})")
_PIPELINE = re.compile(rf"\bsteps: (\d{{1,15}}) loss: ({NUMBER})(?: iter time \(s\): ({NUMBER}))?")


def _parse(text: str) -> Parsed | None:
    found = _STEP.search(text)
    if found is not None:
        columns = (names.STEP, names.SKIPPED, "train/lr")
    else:
        found = _PIPELINE.search(text)
        columns = (names.STEP, names.LOSS, "train/step_time_s")
    if found is None:
        return None
    read = zip(columns, (number(part or "") for part in found.groups()), strict=True)
    return Parsed({name: value for name, value in read if value is not None})


FORMAT = LineFormat(
    "deepspeed",
    _parse,
    marks=("skipped=", "steps: "),
    loss_kind="step",
    cannot_show=("Gradient norms are not in the log.",),
)
