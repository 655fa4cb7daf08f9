"""The table of pathologies: which symptoms to look for in a run, and which of them can explain which.

What each one means, how to confirm it and what to do is in the catalog (``entries/pathologies.py``,
``entries/events.py``), what there is to doubt in ``doubts.py``; ``docs/findings.md`` is made from all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from palingenesis.findings.case import Case
from palingenesis.findings.finding import Finding
from palingenesis.findings.symptoms.data import data_quality, loss_spike, packing_leak
from palingenesis.findings.symptoms.ending import failed, other_warnings, steps_skipped
from palingenesis.findings.symptoms.evaluation import evaluation_lost, overfitting, source_overfitting
from palingenesis.findings.symptoms.layers import (
    layer_exploding,
    layer_stopped,
    layer_vanishing,
    never_trained,
    no_gradients,
    not_optimized,
    rank_outlier,
)
from palingenesis.findings.symptoms.learning import lr_too_high, lr_too_low
from palingenesis.findings.symptoms.machine import memory_grows, memory_pressure, slow_throughput
from palingenesis.findings.symptoms.numbers import (
    nan_hidden,
    no_loss_tokens,
    no_zero_grad,
    nonfinite,
    replicas_diverge,
    updates_lost,
    zero_loss_nan_norm,
)
from palingenesis.findings.symptoms.resuming import data_after_resume, tracker_rows, worse_after_resume
from palingenesis.findings.symptoms.schedule import lr_schedule
from palingenesis.findings.symptoms.weights import (
    entropy_collapse,
    forgetting,
    layer_imbalance,
    representation_collapse,
)


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
    """Pathologies that can explain this one, where they were found too and began no later.

    They come before it in the table; of two that can explain each other, the one that began first explains.
    """

    not_yet: tuple[str, ...] = ()
    """Remedies that are known and that this project has no option for yet."""


_DIVERGENCE = ("run.no_zero_grad", "run.worse_after_resume", "run.lr_too_high")

#: A batch that spikes makes a layer explode, and a layer that exploded makes the next losses spike: the one
#: that was first explains the other.
_TO_AND_FRO = ("run.layer_stopped", "run.layer_exploding")
_LAYERS = ("run.layer_stopped", "run.layer_vanishing", "run.layer_exploding")

PATHOLOGIES: tuple[Pathology, ...] = (
    Pathology(
        "run.no_gradients",
        ("step() called before backward(), or after zero_grad()", "a first check before any backward pass"),
        no_gradients,
    ),
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
        "run.rank_outlier",
        ("a shard of the data unlike the others", "a batch of that rank without loss-bearing tokens"),
        rank_outlier,
        follows_from=("run.replicas_diverge",),
    ),
    Pathology(
        "run.not_optimized",
        ("an optimizer made before layers were added, replaced or unfrozen", "a parameter group left out"),
        not_optimized,
    ),
    Pathology(
        "run.never_trained",
        (
            "detach() or no_grad() between the layer and the loss",
            "an output that the loss does not use",
            "gradient checkpointing of frozen inputs without enable_input_require_grads",
        ),
        never_trained,
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
        "run.steps_skipped",
        (
            "gradients beyond what float16 can hold",
            "a loss scale that is too high and comes down slowly",
            "a rule that skips spikes and skips too many",
        ),
        steps_skipped,
        follows_from=("run.no_zero_grad",),
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
        follows_from=("run.replicas_diverge", "run.no_zero_grad", "run.worse_after_resume"),
    ),
    Pathology(
        "run.layer_stopped",
        (
            "a layer frozen, replaced or detached on the way",
            "a branch that is no longer taken",
            "an activation that is zero for every input",
        ),
        layer_stopped,
        follows_from=("run.worse_after_resume", "run.lr_too_high"),
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
        follows_from=(*_DIVERGENCE, "run.rank_outlier", "run.data_after_resume", *_TO_AND_FRO),
        not_yet=("pgs prepare", "skipping steps at spikes"),
    ),
    Pathology(
        "run.loss_spike",
        ("one batch unlike the rest", "a step that went too far"),
        loss_spike,
        follows_from=(*_DIVERGENCE, "run.rank_outlier", *_TO_AND_FRO),
        not_yet=("skipping steps at spikes",),
    ),
    Pathology(
        "run.layer_exploding",
        ("a batch unlike the rest", "a learning rate too high for this layer", "weights that grow"),
        layer_exploding,
        follows_from=(*_DIVERGENCE, "run.rank_outlier", "run.data_quality", "run.loss_spike"),
    ),
    Pathology(
        "run.layer_vanishing",
        (
            "a saturated or dead layer behind it",
            "weights of a layer behind it that were scaled or zeroed",
            "a step that went too far",
        ),
        layer_vanishing,
        follows_from=(*_DIVERGENCE, "run.layer_stopped", "run.layer_exploding"),
    ),
    Pathology(
        "run.nonfinite",
        (
            "a learning rate that is too high",
            "a batch without a loss-bearing token",
            "overflow in half precision",
        ),
        nonfinite,
        follows_from=(
            *("run.no_loss_tokens", "run.steps_skipped", "run.rank_outlier", "run.replicas_diverge"),
            *(*_DIVERGENCE, "run.layer_exploding", "run.data_quality", "run.loss_spike"),
        ),
    ),
    Pathology(
        "run.nan_hidden",
        ("a log that leaves out or replaces values that are not finite", "a loss taken before the fault"),
        nan_hidden,
        follows_from=("run.nonfinite", "run.lr_too_high"),
    ),
    Pathology(
        "run.zero_loss_nan_norm",
        ("a log that replaces NaN by zero (transformers: logging_nan_inf_filter)",),
        zero_loss_nan_norm,
        follows_from=("run.nonfinite", "run.lr_too_high", "run.no_loss_tokens"),
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
        follows_from=("run.lr_too_high", "run.nonfinite", "run.worse_after_resume"),
        not_yet=("base_merge", "pretrain_replay_dataset"),
    ),
    Pathology(
        "run.source_overfitting",
        ("a small source with a large weight, seen many times", "sources that contradict each other"),
        source_overfitting,
        follows_from=("run.data_after_resume",),
        not_yet=("msft_tracking",),
    ),
    Pathology(
        "run.overfitting",
        ("more passes than the data is worth", "evaluation data unlike the training data"),
        overfitting,
        follows_from=("run.data_after_resume", "run.source_overfitting"),
        not_yet=("base_merge",),
    ),
    Pathology(
        "run.evaluation_lost",
        ("an evaluation row whose every token is masked", "overflow in half precision"),
        evaluation_lost,
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
        follows_from=(
            *("run.not_optimized", "run.never_trained", "run.no_loss_tokens", "run.steps_skipped"),
            *("run.lr_schedule", "run.updates_lost", "run.nan_hidden", "run.layer_stopped"),
        ),
    ),
    Pathology(
        "run.memory_grows",
        (
            "losses or outputs kept with their graph",
            "a list or cache that nobody empties",
            "workers of the loader that keep what they read",
        ),
        memory_grows,
    ),
    Pathology(
        "run.memory_pressure",
        ("batches too large or rows too long for the device", "whole logits", "memory in fragments"),
        memory_pressure,
        follows_from=("run.memory_grows",),
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
        follows_from=("run.memory_grows", "run.memory_pressure"),
    ),
    Pathology(
        "run.failed",
        ("what the error names", "a batch that the program cannot take", "a machine that failed"),
        failed,
        follows_from=("run.nonfinite", "run.replicas_diverge", "run.memory_grows"),
    ),
    Pathology(
        "run.other_warnings",
        ("what the events say",),
        other_warnings,
        follows_from=(*_DIVERGENCE, "run.nonfinite", *_LAYERS),
    ),
    Pathology(
        "run.tracker_rows",
        ("a resume from before the last recorded step", "a tracker that takes no step twice"),
        tracker_rows,
    ),
)
