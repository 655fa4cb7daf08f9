"""Any line in which a loss has a name: of scripts with a format of their own, of Keras, fairseq::

    Epoch 0:  24%|██▍       | 120/500 [01:00<05:00, 1.9it/s, loss=2.06]
    Epoch 1/10, step 100/5000, Loss: 1.2345, lr = 1e-4, grad norm 0.81
    epoch=3 train_loss=0.123 val_loss=0.456

Shows what has a name that is known; whether a loss is of a step or a mean is not.
"""

from __future__ import annotations

import re

from palingenesis.runlogs import names
from palingenesis.runlogs.formats.base import LineFormat, Parsed, word_pairs
from palingenesis.runlogs.spelling import NUMBER, number

_STEP = re.compile(
    r"\b(?:global[ _-]?)?(?:step|iter(?:ation)?|batch|update|it)s?\s{0,3}[:=#\[(]?\s{0,3}(\d[\d,]{0,14})"
    r"(?:\s{0,3}(?:/|of)\s{0,3}(\d[\d,]{0,14}))?(?![\d.])",
    re.IGNORECASE,
)
#: Of tqdm, with numbers behind it: ``120/500 [01:00<05:00, 1.9it/s, loss=2.06]``.
_BAR = re.compile(
    r"\b(\d{1,12})/(\d{1,12}) \[[\d:]{4,12}<[\d:?]{1,12}(?:,\s{0,3}(\d{1,9}(?:\.\d{1,6})?)(it/s|s/it))?[,\]]"
)
_EPOCH = re.compile(
    r"\bepochs?\s{0,3}[:=#\[(]?\s{0,3}(\d{1,9}(?:\.\d{1,9})?)(?:\s{0,3}/\s{0,3}\d{1,9})?", re.IGNORECASE
)
#: A loss with nothing but a blank before its number.
_LOSS = re.compile(
    rf"\b(?P<split>(?:train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|dev|test)[ "
    rf"_/-])?loss(?:\s{{0,3}}[:=]|\s{{0,3}}is\b)?"
    rf"\s{{0,6}}(?P<value>{NUMBER})(?![\w.]*[A-Za-z_])",
    re.IGNORECASE,
)
_SHORTS = re.compile(
    rf"\b(?P<key>lr|learning rate|grad(?:ient)?[ "
    rf"_-]?norm|norm|ppl|perplexity)\s{{0,3}}[:=]?\s{{0,6}}(?P<value>{NUMBER})(?![\w.]*[A-Za-z_])",
    re.IGNORECASE,
)


def _parse(text: str) -> Parsed | None:
    row: dict[str, float] = {}
    for found in _LOSS.finditer(text):
        value = number(found["value"])
        split = (found["split"] or "").lower()
        if value is not None:
            row.setdefault(names.LOSS if not split or split.startswith("train") else names.EVAL_LOSS, value)
    others = word_pairs(text)
    if not any(map(names.is_loss, row)) and not any(map(names.is_loss, others)):
        return None
    for found in _SHORTS.finditer(text):
        value = number(found["value"])
        if value is not None:
            row.setdefault(names.metric_name(found["key"]), value)
    for name, value in others.items():
        if name not in (names.STEP, names.EPOCH):
            row.setdefault(name, value)
    return Parsed({**row, **_places(text)})


def _places(text: str) -> dict[str, float]:
    found = _STEP.search(text)
    places = {}
    if found is not None:
        places[names.STEP] = float(found[1].replace(",", ""))
        if found[2]:
            places[names.TOTAL] = float(found[2].replace(",", ""))
    epoch = _EPOCH.search(text)
    if epoch is not None:
        places[names.EPOCH] = float(epoch[1])
    bar = _BAR.search(text) if names.STEP not in places else None
    if bar is not None:
        _add_bar(places, bar)
    return places


def _add_bar(places: dict[str, float], bar: re.Match[str]) -> None:
    """The place of a progress bar; one that starts anew with each epoch goes on from the epochs before."""
    at, end = float(bar[1]), float(bar[2])
    if names.EPOCH in places:
        places[names.STEP] = places[names.EPOCH] * end + at
    else:
        places |= {names.STEP: at, names.TOTAL: end}
    speed = float(bar[3]) if bar[3] else 0.0
    if speed > 0:
        places["train/step_time_s"] = 1 / speed if bar[4] == "it/s" else speed


FORMAT = LineFormat(
    "pairs",
    _parse,
    marks=("loss", "Loss", "LOSS"),
    cannot_show=("The log does not say whether a loss is of one step or a mean.",),
    broad=True,
)
