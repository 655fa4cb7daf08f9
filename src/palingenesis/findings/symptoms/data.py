"""Symptoms of data: losses that jump, batches that did it, packed neighbours that leak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from palingenesis.findings.case import Case, loss_of
from palingenesis.findings.finding import Finding
from palingenesis.findings.sources import Source
from palingenesis.findings.trends import median
from palingenesis.record.columns import Floats
from palingenesis.record.spikes import SPIKES_FOLDER, read_spikes

BATCH = "train/batch"
_TOKENS = "train/tokens_total_all"
#: Strategies of TRL by which packed samples see each other.
_LEAKS = ("wrapped",)
#: What two runs must have alike, for their losses on the same tokens to be compared.
_ALIKE = ("learning_rate", "schedule", "objective", "max_length", "optimizer")


def data_quality(case: Case) -> Finding | None:
    """Spikes as a habit: by events, by what a spike rule skipped, or by the losses themselves."""
    limits = case.limits
    spikes = case.spikes
    skipped = case.series("train/spikes_skipped")
    share_skipped = float(skipped.value[-1] / max(skipped.step[-1], 1)) if skipped else 0.0
    hard = case.hard_batches
    share_out = len(hard.step) / max(len(case.loss.value), 1)
    many_out = len(hard.step) >= limits.outliers_least and share_out > limits.outlier_share
    many_out = many_out and float(np.median(hard.value)) > np.log(limits.outlier_height)
    out = hard.step.astype(int).tolist() if many_out else []
    many = len(spikes) >= limits.spikes_many
    if not (many or many_out or share_skipped > limits.spikes_skipped):
        return None
    steps = sorted({*spikes, *out})
    told = []
    if share_skipped > limits.spikes_skipped:
        told.append(f"{share_skipped:.1%} of the steps were skipped as spikes")
    if steps:
        told.append(f"the loss jumped at {len(steps)} steps, the first at step {steps[0]}")
    return Finding(
        "run.data_quality",
        "warning",
        f"{' and '.join(told)}: some batches are unlike the rest",
        {
            "steps": steps,
            **batches_of(case, steps),
            "spike_events": len(case.events("loss_spike")),
            "share_skipped": share_skipped,
            "share_of_losses": share_out,
        },
        "look for bad rows with pgs validate --all and pgs inspect and take them out of data.dataset; "
        "train.max_grad_norm: 1.0 bounds what one batch can do meanwhile",
        since=steps[0] if steps else int(skipped.step[np.argmax(skipped.value > 0)]),
        # By the losses alone, harder sources look just the same.
        confidence=limits.agreeing if len(told) > 1 else None if many or share_skipped else limits.shared,
    )


def loss_spike(case: Case) -> Finding | None:
    """A few spikes: which batch it was. As a habit they are :func:`data_quality`."""
    steps = case.spikes
    if not 0 < len(steps) < case.limits.spikes_many:
        return None
    batches = batches_of(case, steps)
    named = batches.get("batches") or []
    which = f", in batch {named[0]}" if named else ""
    layers = [
        event.layer
        for event in case.events("gradient_spike")
        if event.step in steps and event.layer is not None
    ]
    value, baseline = _height(case, steps[0])
    height = "" if value is None else f" to {value:.4g}"
    again = f", and again at step {', '.join(map(str, steps[1:]))}" if len(steps) > 1 else ""
    return Finding(
        "run.loss_spike",
        "warning",
        f"the loss jumped{height} at step {steps[0]}{which}{again}",
        {"steps": steps, **batches, "layers": layers, "baseline": baseline},
        "look at that batch's rows (pgs inspect); if nothing is wrong with them, train.max_grad_norm: 1.0 "
        "bounds what one batch can do",
        since=steps[0],
    )


def _height(case: Case, step: int) -> tuple[float | None, float | None]:
    """The loss at a spike and what it was before: by the event, or else by the numbers."""
    for event in case.events("loss_spike"):
        if event.step == step:
            return (event.value if isinstance(event.value, float) else None), event.baseline
    for spike in case.curve_spikes:
        if int(spike.step) == step:
            return spike.peak, spike.base
    return None, None


def batches_of(case: Case, steps: list[int]) -> dict[str, Any]:
    """What is known of the batches of these steps: their fingerprints, and samples that were kept."""
    if not steps:
        return {}
    wanted = set(steps)
    known: dict[str, Any] = {
        "batches": [
            str(row.values[BATCH])
            for row in case.rows(f'"{BATCH}"')
            if row.counts and row.step in wanted and BATCH in row.values
        ]
    }
    folder = case.source.folder
    if folder is not None and (folder / SPIKES_FOLDER).is_dir():
        kept = [spike for spike in read_spikes(folder) if spike.step in wanted]
        known["samples"] = [sample.name for spike in kept for sample in spike.samples]
    return known


class _Bins(NamedTuple):
    mean: Floats
    difference: Floats


def packing_leak(case: Case) -> Finding | None:
    """By the trainer's own configuration, or the loss by tokens against an unpacked run on the same data."""
    options = case.source.training.get("options")
    if isinstance(options, Mapping) and options.get("packing_strategy") in _LEAKS and options.get("packing"):
        return _leaks_by_design(case, str(options["packing_strategy"]))
    if case.unpacked is None or not _comparable(case.source.training, case.unpacked.training):
        return None
    limits = case.limits
    bins = _compared(case.source, case.unpacked, limits.packing_bins)
    if bins is None:
        return None
    middle, usual = median(bins.difference, limits.alpha), float(np.median(bins.mean))
    away = min(abs(middle.low), abs(middle.high)) if middle.low * middle.high > 0 else 0.0
    # There from the first tokens on: later, two runs part by themselves.
    at_once = bins.difference[0] * middle.value > 0 and abs(bins.difference[0]) > abs(middle.value) / 2
    if away <= limits.packing_difference * abs(usual) or not at_once:
        return None
    return Finding(
        "run.packing_leak",
        "warning",
        f"the packed run's loss differs from the unpacked run's on the same tokens by {middle.value:+.3g} "
        f"({middle.value / usual:+.1%}), from the beginning on: packed rows seem to see each other",
        {"difference": middle.value, "between": [middle.low, middle.high], "parts": len(bins.difference)},
        "data.packing: false until it is explained; packed samples are kept apart by design, so please "
        "report it",
        since=int(case.loss.step[0]),
        confidence=limits.single if case.source.training and case.unpacked.training else limits.shared,
    )


def _leaks_by_design(case: Case, strategy: str) -> Finding:
    return Finding(
        "run.packing_leak",
        "warning",
        f"samples are packed with packing_strategy={strategy!r}, which cuts them anywhere and lets them "
        "attend to their neighbours",
        {"packing_strategy": strategy},
        'packing_strategy="bfd" in the SFTConfig of TRL, which keeps samples apart; pgs train does too '
        "(data.packing: true)",
        since=int(case.loss.step[0]) if case.loss else None,
        confidence=case.limits.agreeing,
    )


def _comparable(packed: Mapping[str, Any], unpacked: Mapping[str, Any]) -> bool:
    """Whether packing can be the difference: as far as both configurations are known, all else is alike."""
    if packed.get("packing") is False or unpacked.get("packing") is True:
        return False
    return all(packed[name] == unpacked[name] for name in _ALIKE if name in packed and name in unpacked)


def _compared(packed: Source, unpacked: Source, parts: int) -> _Bins | None:
    """Mean loss over equal parts of the tokens that both runs have seen."""
    curves = [_by_tokens(packed), _by_tokens(unpacked)]
    known = [curve for curve in curves if curve is not None]
    if len(known) < 2:
        return None
    end = min(float(tokens[-1]) for tokens, _ in known)
    edges = np.linspace(0.0, end, parts + 1)
    # The integral of the loss over tokens, at the edges of the parts.
    totals = [
        np.interp(edges, np.concatenate([[0.0], tokens]), np.concatenate([[0.0], total]))
        for tokens, total in known
    ]
    means = [np.diff(total) / np.diff(edges) for total in totals]
    if not all(len(tokens) >= parts for tokens, _ in known):
        return None
    return _Bins(means[1], means[0] - means[1])


def _by_tokens(source: Source) -> tuple[Floats, Floats] | None:
    """Tokens so far, and the loss summed over them."""
    tokens, loss = source.series(_TOKENS), loss_of(source)
    steps, at, where = np.intersect1d(tokens.step, loss.step, return_indices=True)
    if len(steps) < 2:
        return None
    so_far = tokens.value[at]
    each = np.diff(so_far, prepend=0.0)
    return (so_far, np.cumsum(loss.value[where] * each)) if (each > 0).all() else None
