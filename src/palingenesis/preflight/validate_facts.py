"""What was counted, as distributions: numbers that are no finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from palingenesis.findings import Finding
from palingenesis.preflight.checks.packing import packing_saves
from palingenesis.preflight.checks.text import SCRIPTS
from palingenesis.preflight.samples import Split
from palingenesis.preflight.tally import Tally
from palingenesis.preflight.validate_findings import MOST_PADDING
from palingenesis.preflight.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from palingenesis.findings import Report
    from palingenesis.sft.config import TrainConfig

#: Points of a distribution that are told.
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
#: Sets the draw of batches here apart from other draws of the same seed.
_BATCHES = 5


def facts_of(config: TrainConfig, tally: Tally, split: Split) -> dict[str, Any]:
    """The distributions of one split."""
    length, loss = np.asarray(tally.length, dtype=float), np.asarray(tally.loss, dtype=float)
    source = np.asarray(tally.source)
    share = loss / np.maximum(length, 1)
    by_source = {}
    for title, rows in tally.rows.items():
        chosen = source == (tally.sources.index(title) if title in tally.sources else -1)
        by_source[title] = {
            "rows": rows,
            "used": tally.used[title],
            "samples": int(chosen.sum()),
            "tokens": int(length[chosen].sum()),
            "loss_tokens": int(loss[chosen].sum()),
            "loss_share": _quantiles(share[chosen]),
            "length": _quantiles(length[chosen]),
        }
    scripts = np.bincount(np.asarray(tally.script, dtype=int), minlength=len(SCRIPTS))
    found = {
        "rows": tally.rows.total(),
        "used": tally.used.total(),
        "samples": len(length),
        "tokens": int(length.sum()),
        "loss_tokens": int(loss.sum()),
        "loss_share": _quantiles(share),
        "length": _quantiles(length),
        "length_before_cut": _quantiles(np.asarray(tally.whole, dtype=float)),
        "cut": int((np.asarray(tally.whole) > np.asarray(tally.length)).sum()),
        "answers_cut": tally.answers_cut,
        "reasoning_left_out_by_the_template": tally.reasoning_dropped,
        "loss_tokens_by_turn": [
            {"turn": number, "answers": count, "mean": total / count if count else 0.0}
            for number, (count, total) in enumerate(tally.by_turn, start=1)
        ],
        "scripts": {name: int(count) for name, count in zip(SCRIPTS, scripts, strict=True) if count},
        "by_source": by_source,
    }
    if split == "train" and len(length):
        found["batches"] = _batches(config, tally)
    return found


def _batches(config: TrainConfig, tally: Tally) -> dict[str, Any]:
    """Padding of batches as they are checked and as they are drawn, and what packing does to their number."""
    length = np.asarray(tally.length)
    found: dict[str, Any] = {
        "size": config.train.per_device_batch_size,
        "packed": config.data.packing,
        "padding_share_checked": 1 - int(length.sum()) / tally.cells if tally.cells else 0.0,
        "padding_share": 0.0 if config.data.packing else padding_share(config, length),
    }
    if config.data.max_seq_length is not None:
        found["packing"] = packing_saves(tally.length, config.data.max_seq_length)
    return found


def padding_share(config: TrainConfig, length: NDArray[Any]) -> float:
    """The share of positions that pad, in batches drawn at random as training draws them."""
    size = config.train.per_device_batch_size
    whole = len(length) // size * size
    if size == 1 or not whole:
        return 0.0
    drawn = np.random.default_rng([config.train.seed, _BATCHES]).permutation(length)[:whole]
    rows = drawn.reshape(-1, size)
    return float(1 - rows.sum() / (rows.max(axis=1).sum() * size))


def padding_waste(config: TrainConfig, tally: Tally) -> list[Finding]:
    """Told where so much is padding that packing would be worth a thought."""
    length = np.asarray(tally.length)
    share = padding_share(config, length)
    if share < MOST_PADDING:
        return []
    message = f"{share:.0%} of the positions of a batch are padding"
    return [Finding("data.padding", "info", message, {"share": share}, "set data.packing to true")]


def _quantiles(values: NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return {}
    found = np.quantile(values, _QUANTILES)
    named = {f"p{round(100 * point)}": float(value) for point, value in zip(_QUANTILES, found, strict=True)}
    return {"mean": float(values.mean()), **named}


# -- in words ----------------------------------------------------------------------------------------------


def print_facts(report: Report, console: Console) -> None:
    """The distributions in a few lines."""
    for split in ("train", "eval"):
        facts: Mapping[str, Any] | None = report.facts.get(split)
        if facts is not None:
            for line in _lines(split, facts):
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(split: str, facts: Mapping[str, Any]) -> list[str]:
    name = "training" if split == "train" else "evaluation"
    share = facts["loss_tokens"] / facts["tokens"] if facts["tokens"] else 0.0
    lines = [
        f"{name}: {facts['used']} of {counted(facts['rows'], 'row')} used, "
        f"{counted(facts['samples'], 'sample')}, {counted(facts['tokens'], 'token')}, {share:.1%} bear loss"
    ]
    if not facts["samples"]:
        return lines
    lines += [f"  loss share  {_spread(facts['loss_share'], percent=True)}"]
    lines += [f"  length      {_spread(facts['length'])}"]
    turns = facts["loss_tokens_by_turn"][:5]
    if turns:
        told = ", ".join(f"{turn['mean']:.0f} in answer {turn['turn']}" for turn in turns)
        lines.append(f"  loss-bearing tokens on average: {told}")
    if facts["cut"]:
        lines.append(
            f"  cut at data.max_seq_length: {facts['cut']}, of which {facts['answers_cut']} lose answers"
        )
    if len(facts["by_source"]) > 1:
        for title, each in facts["by_source"].items():
            part = each["loss_tokens"] / each["tokens"] if each["tokens"] else 0.0
            rows = counted(each["rows"], "row")
            lines.append(f"  {title}: {each['used']} of {rows}, {part:.1%} of its tokens bear loss")
    if "batches" in facts:
        lines.append(_batches_in_words(facts["batches"]))
    return lines


def _batches_in_words(facts: Mapping[str, Any]) -> str:
    told = f"  batches of {facts['size']}: {facts['padding_share']:.0%} padding"
    if saved := facts.get("packing"):
        told += (
            f"; packing makes {counted(saved['packed_rows'], 'row')} of {counted(saved['samples'], 'sample')}"
        )
    return told


def _spread(points: Mapping[str, float], *, percent: bool = False) -> str:
    form = "{:.0%}" if percent else "{:.0f}"
    names = {"p0": "least", "p25": "quarter", "p50": "half", "p75": "three quarters", "p100": "most"}
    return ", ".join(f"{word} {form.format(points[name])}" for name, word in names.items())
