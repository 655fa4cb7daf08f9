"""What the Trainer of transformers prints, and TRL's and all others that stand on it::

    {'loss': '4.613', 'grad_norm': '1.155', 'learning_rate': '0.001', 'epoch': '0.125'}       transformers 5
    {'loss': 5.6332, 'grad_norm': nan, 'learning_rate': 0.0002, 'epoch': 0.09}                transformers 4
    {'eval_loss': '4.6', 'eval_runtime': '0.1434', 'epoch': '0.5'}
    {'train_runtime': 7.2, 'train_loss': 3.1, 'epoch': 1.0}                                      the end

Shows loss, gradient norm before clipping, learning rate, epochs and evaluations; TRL adds entropy, token
accuracy and tokens so far. Has no steps: ``trainer_state.json`` beside it has. The loss is a mean over the
logging steps, with four digits; NaN in it is replaced by 0 unless ``logging_nan_inf_filter`` is off.
"""

from __future__ import annotations

import re

from palingenesis.runlogs.formats.base import LineFormat, Parsed
from palingenesis.runlogs.formats.entries import entry

#: A pair counts only with what ends it: a line that was cut may end in half a number.
_PAIR = re.compile(
    r"""['"]([^'"{}]{1,120})['"]\s{0,4}:\s{0,4}(?:'([^']{0,64})'|"([^"]{0,64})"|([^,{}\[\]'"]{1,64}?))\s{0,4}(?=[,}])"""
)
_DICT = re.compile(r"\{'[^{}]*\}")

CANNOT_SHOW = (
    "The loss is the mean over the logging steps before the line, rounded: what lasts shorter is hidden.",
    "NaN and infinite losses are left out of that mean (logging_nan_inf_filter), so a loss of 0 may be "
    "a NaN.",
)


def _parse(text: str) -> Parsed | None:
    found = _DICT.search(text)
    if found is None:
        return None
    return entry((match[1], match[2] or match[3] or match[4] or "") for match in _PAIR.finditer(found[0]))


FORMAT = LineFormat(
    "transformers",
    _parse,
    marks=("{'",),
    loss_kind="interval_mean",
    cannot_show=(*CANNOT_SHOW, "There are no steps: they are worked out from epochs and the progress bar."),
)
