"""Symptoms of data: losses that jump, batches that did it, packed neighbours that leak."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from palingenesis.findings.case import LOSS, Case, Series, series_of
from palingenesis.findings.finding import Finding
from palingenesis.findings.trends import median, spread
from palingenesis.record.columns import Floats
from palingenesis.record.reader import Run

BATCH = "train/batch"
_TOKENS = "train/tokens_total_all"


def data_quality(case: Case) -> Finding | None:
    """Spikes as a habit: by events, by what a spike rule skipped, or by the losses themselves."""
    limits = case.limits
    spikes = [event.step for event in case.events("loss_spike")]
    skipped = case.series("train/spikes_skipped")
    share_skipped = float(skipped.value[-1] / max(skipped.step[-1], 1)) if skipped else 0.0
    out = _outliers(case.loss, case)
    share_out = len(out) / max(len(case.loss.value), 1)
    many_out = len(out) >= limits.outliers_least and share_out > limits.outlier_share
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
            "batches": batches_of(case, steps),
            "spike_events": len(spikes),
            "share_skipped": share_skipped,
            "share_of_losses": share_out,
        },
        "look for bad rows with pgs validate --all and pgs inspect and take them out of data.dataset; "
        "train.max_grad_norm: 1.0 bounds what one batch can do meanwhile",
    )


def _outliers(loss: Series, case: Case) -> list[int]:
    """Steps whose log loss is far above the running median."""
    limits = case.limits
    half = limits.window // 2
    if len(loss.value) < 2 * limits.window or not (loss.value > 0).all():
        return []
    log = np.log(loss.value)
    usual = np.median(np.lib.stride_tricks.sliding_window_view(log, limits.window), axis=1)
    off = log[half : len(log) - half] - usual
    far = off > limits.outlier * max(spread(off), 1e-12)
    return [int(step) for step in loss.step[half : len(log) - half][far]]


def loss_spike(case: Case) -> Finding | None:
    """A few spikes: which batch it was. As a habit they are :func:`data_quality`."""
    spikes = case.events("loss_spike")
    if not 0 < len(spikes) < case.limits.spikes_many:
        return None
    first, steps = spikes[0], [event.step for event in spikes]
    batches = batches_of(case, steps)
    which = f", in batch {batches[0]}" if batches else ""
    layers = [
        event.layer
        for event in case.events("gradient_spike")
        if event.step in steps and event.layer is not None
    ]
    return Finding(
        "run.loss_spike",
        "warning",
        f"the loss jumped to {first.value:.4g} at step {first.step}{which}"
        if isinstance(first.value, float)
        else f"the loss jumped at step {first.step}{which}",
        {"steps": steps, "batches": batches, "layers": layers, "baseline": first.baseline},
        "look at that batch's rows (pgs inspect); if nothing is wrong with them, train.max_grad_norm: 1.0 "
        "bounds what one batch can do",
    )


def batches_of(case: Case, steps: list[int]) -> list[str]:
    """The fingerprints of the batches of these steps, where batches carry one."""
    if not steps:
        return []
    wanted = set(steps)
    return [
        str(row.values[BATCH])
        for row in case.rows(f'"{BATCH}"')
        if row.counts and row.step in wanted and BATCH in row.values
    ]


class _Bins(NamedTuple):
    mean: Floats
    difference: Floats


def packing_leak(case: Case) -> Finding | None:
    """The loss by tokens, against that of an unpacked run on the same data."""
    if case.unpacked is None:
        return None
    limits = case.limits
    bins = _compared(case.run, case.unpacked, limits.packing_bins)
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
    )


def _compared(packed: Run, unpacked: Run, parts: int) -> _Bins | None:
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


def _by_tokens(run: Run) -> tuple[Floats, Floats] | None:
    """Tokens so far, and the loss summed over them."""
    tokens = series_of(run, _TOKENS)
    loss = series_of(run, "train/ce_loss") or series_of(run, LOSS)
    steps, at, where = np.intersect1d(tokens.step, loss.step, return_indices=True)
    if len(steps) < 2:
        return None
    so_far = tokens.value[at]
    each = np.diff(so_far, prepend=0.0)
    return (so_far, np.cumsum(loss.value[where] * each)) if (each > 0).all() else None
