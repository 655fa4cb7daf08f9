"""Pathologies of runs: which symptoms to look for in a record, causes before what follows from them.

What each one means, how to confirm it and what to do is in the catalog (``entries/pathologies.py``); the page
``docs/findings.md`` is made from both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from palingenesis.findings.case import Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.limits import Limits
from palingenesis.findings.symptoms.data import data_quality, loss_spike, packing_leak
from palingenesis.findings.symptoms.evaluation import overfitting, source_overfitting
from palingenesis.findings.symptoms.learning import lr_too_high, lr_too_low
from palingenesis.findings.symptoms.machine import memory_pressure, slow_throughput
from palingenesis.findings.symptoms.numbers import (
    lr_schedule,
    nan_hidden,
    no_loss_tokens,
    no_zero_grad,
    nonfinite,
    replicas_diverge,
    updates_lost,
    zero_loss_nan_norm,
)
from palingenesis.findings.symptoms.resuming import data_after_resume, tracker_rows, worse_after_resume
from palingenesis.findings.symptoms.weights import (
    entropy_collapse,
    forgetting,
    layer_imbalance,
    representation_collapse,
)
from palingenesis.record.reader import Run


@dataclass(frozen=True)
class Pathology:
    """One thing that goes wrong with runs."""

    check: str
    """Id of its finding, and of its entry in the catalog."""

    causes: tuple[str, ...]
    """What brings it about, likeliest first."""

    sees: Callable[[Case], Finding | None]
    """The symptom. Silent where the record lacks what it needs."""

    follows_from: tuple[str, ...] = ()
    """Pathologies that explain this one where they were found too; all come before it."""

    not_yet: tuple[str, ...] = ()
    """Remedies that are known and that this project has no option for yet."""


_DIVERGENCE = ("run.no_zero_grad", "run.worse_after_resume", "run.lr_too_high")

PATHOLOGIES: tuple[Pathology, ...] = (
    Pathology(
        "run.replicas_diverge",
        (
            "code that changes parameters on one rank only",
            "parameters left out of the gradient reduction",
            "ranks that started from different weights",
        ),
        replicas_diverge,
    ),
    Pathology(
        "run.no_zero_grad",
        ("zero_grad is never called, or on another optimizer", "gradients kept on purpose and never reset"),
        no_zero_grad,
    ),
    Pathology(
        "run.no_loss_tokens",
        (
            "rows whose every token is masked, at a batch of one row",
            "answers cut off by the longest length",
            "a template that does not mark the answers",
        ),
        no_loss_tokens,
    ),
    Pathology(
        "run.lr_schedule",
        (
            "the scheduler is stepped at each micro-batch, or by each rank",
            "it was given too few steps",
            "it was given the number of rows or micro-batches of another set-up",
        ),
        lr_schedule,
    ),
    Pathology(
        "run.data_after_resume",
        (
            "the position in the data was not saved",
            "data, seed, batch size or ranks changed",
            "a sampler that shuffles by time",
        ),
        data_after_resume,
    ),
    Pathology(
        "run.worse_after_resume",
        (
            "tied embeddings that became two tensors",
            "weights missing from the checkpoint and made anew",
            "an optimizer state that was not loaded",
        ),
        worse_after_resume,
    ),
    Pathology(
        "run.updates_lost",
        ("weights in bfloat16 with a small learning rate", "no master weights in float32"),
        updates_lost,
    ),
    Pathology(
        "run.lr_too_high",
        ("the learning rate", "too short a warm-up", "a batch too small for it", "gradients that add up"),
        lr_too_high,
        follows_from=("run.no_zero_grad", "run.worse_after_resume"),
    ),
    Pathology(
        "run.packing_leak",
        (
            "position ids that are not reset between packed samples",
            "an attention implementation that does not keep packed samples apart",
        ),
        packing_leak,
    ),
    Pathology(
        "run.data_quality",
        (
            "rows with broken, repeated or foreign text",
            "samples of few loss-bearing tokens",
            "sources that are very unlike each other",
        ),
        data_quality,
        follows_from=_DIVERGENCE,
        not_yet=("pgs prepare", "skipping steps at spikes"),
    ),
    Pathology(
        "run.loss_spike",
        ("one batch unlike the rest", "a step that went too far"),
        loss_spike,
        follows_from=_DIVERGENCE,
        not_yet=("skipping steps at spikes",),
    ),
    Pathology(
        "run.nonfinite",
        (
            "a learning rate that is too high",
            "a batch without a loss-bearing token",
            "overflow in half precision",
        ),
        nonfinite,
        follows_from=("run.no_loss_tokens", *_DIVERGENCE),
    ),
    Pathology(
        "run.nan_hidden",
        ("a log that leaves out or replaces values that are not finite", "a loss taken before the fault"),
        nan_hidden,
        follows_from=("run.nonfinite",),
    ),
    Pathology(
        "run.zero_loss_nan_norm",
        ("a log that replaces NaN by zero (transformers: logging_nan_inf_filter)",),
        zero_loss_nan_norm,
        follows_from=("run.nonfinite",),
    ),
    Pathology(
        "run.layer_imbalance",
        (
            "layers that were newly made beside trained ones",
            "a learning rate too high for some layers",
            "plain SGD",
        ),
        layer_imbalance,
        follows_from=("run.lr_too_high",),
        not_yet=("llrd_decay",),
    ),
    Pathology(
        "run.representation_collapse",
        ("a learning rate that is too high for too long", "data with little variety"),
        representation_collapse,
        follows_from=("run.lr_too_high", "run.nonfinite"),
        not_yet=("sym_noise",),
    ),
    Pathology(
        "run.forgetting",
        ("too high a learning rate, or too many steps", "data far from what the model was trained on"),
        forgetting,
        follows_from=("run.lr_too_high", "run.nonfinite"),
        not_yet=("base_merge", "pretrain_replay_dataset"),
    ),
    Pathology(
        "run.source_overfitting",
        ("a small source with a large weight, seen many times", "sources that contradict each other"),
        source_overfitting,
        not_yet=("msft_tracking",),
    ),
    Pathology(
        "run.overfitting",
        ("more passes than the data is worth", "evaluation data unlike the training data"),
        overfitting,
        follows_from=("run.source_overfitting",),
        not_yet=("base_merge",),
    ),
    Pathology(
        "run.entropy_collapse",
        ("too many passes over the same answers", "answers that are all alike"),
        entropy_collapse,
        follows_from=("run.overfitting",),
        not_yet=("pre_rl",),
    ),
    Pathology(
        "run.lr_too_low",
        (
            "the learning rate",
            "a schedule that has ended",
            "updates that round away",
            "an optimizer that holds other tensors than the model's",
        ),
        lr_too_low,
        follows_from=("run.no_loss_tokens", "run.lr_schedule", "run.updates_lost", "run.nan_hidden"),
    ),
    Pathology(
        "run.memory_pressure",
        ("batches too large or rows too long for the device", "whole logits", "memory in fragments"),
        memory_pressure,
    ),
    Pathology(
        "run.slow_throughput",
        (
            "data that is loaded too slowly",
            "batches too small for the device",
            "something that grows",
            "memory that is nearly full",
        ),
        slow_throughput,
        follows_from=("run.memory_pressure",),
    ),
    Pathology(
        "run.tracker_rows",
        ("a resume from before the last recorded step", "a tracker that takes no step twice"),
        tracker_rows,
    ),
)


def diagnose_run(run: Run, *, unpacked: Run | None = None, limits: Limits | None = None) -> list[Finding]:
    """What a record shows, causes before consequences.

    Args:
        run: the record; whatever it lacks, nothing is said of.
        unpacked: a run on the same data without packing, for a run with packing to be compared with.
        limits: what it is judged by.

    Returns:
        Findings. One that another explains names it in its evidence, under ``may_follow_from``.
    """
    case = Case(run, limits or Limits(), unpacked)
    found: dict[str, Finding] = {}
    for pathology in PATHOLOGIES:
        finding = pathology.sees(case)
        if finding is None:
            continue
        causes = [check for check in pathology.follows_from if check in found]
        if causes:
            finding = dataclasses.replace(finding, evidence={**finding.evidence, "may_follow_from": causes})
        found[pathology.check] = finding
    return list(found.values())
