"""Doubts: how sure a pathology's finding is, what else could look like it, and which experiment tells.

``next`` may hold ``{since}`` (the step from which it shows), ``{third}``, ``{half}`` and ``{twice}`` (the
run's learning rate times that).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Doubt:
    """What there is to doubt about one finding."""

    sure: Literal["certain", "agreeing", "single", "shared"]
    """Name of the confidence in :class:`~palingenesis.findings.limits.Limits`, if the symptom gives none."""

    otherwise: tuple[str, ...]
    """What else could look like this, likeliest first."""

    next: str
    """The experiment that tells, short enough to be done today, and what it will show."""


DOUBTS: dict[str, Doubt] = {
    "run.no_gradients": Doubt(
        "certain",
        ("gradients that were there and had been set to None before the monitor looked",),
        "print one parameter's .grad right before mon.step(loss): None means that the order is wrong",
    ),
    "run.replicas_diverge": Doubt(
        "certain",
        ("parameters that are meant to differ between ranks, such as experts of expert parallelism",),
        "start again on two ranks and compare a hash of the parameter after every step: the first step at "
        "which it differs shows which code runs on one rank only",
    ),
    "run.rank_outlier": Doubt(
        "agreeing",
        ("a device of that rank that computes wrongly", "a batch of that rank that is ordinary and rare"),
        "swap the shards of two ranks and run the same steps: what stays with the shard is data, what stays "
        "with the rank is the device",
    ),
    "run.not_optimized": Doubt(
        "certain",
        ("parameters that another optimizer steps, of which the monitor was not told",),
        "compare one of these parameters before and after optimizer.step(): it must change",
    ),
    "run.never_trained": Doubt(
        "certain",
        ("a layer that is meant to be rarely used, such as an expert or a head of a rare task",),
        "run one batch, call loss.backward() and look which parameter's .grad is None: follow the forward "
        "pass from there to the loss",
    ),
    "run.no_zero_grad": Doubt(
        "agreeing",
        ("one batch that is trained on again and again", "a loss that is multiplied by something that grows"),
        "print the norm of one parameter's gradient right before backward(): 0 or None rules it out",
    ),
    "run.no_loss_tokens": Doubt(
        "certain",
        ("an objective whose exact value may be 0", "a log that writes 0 for a step that was skipped"),
        "count the labels other than -100 in the batch of step {since}: 0 confirms it",
    ),
    "run.steps_skipped": Doubt(
        "certain",
        ("gradients that are infinite whatever the scale: look at the loss of these steps",),
        "run a hundred steps from before step {since} in bfloat16: without a loss scale none is skipped, and "
        "if the loss is lost now, the gradients were",
    ),
    "run.lr_schedule": Doubt(
        "single",
        ("a schedule that was planned to end early", "a log that shows the rate of one of several groups"),
        "print the scheduler's count of steps (last_epoch) after ten optimizer steps: it must be ten",
    ),
    "run.data_after_resume": Doubt(
        "certain",
        ("data that holds the same rows several times",),
        "resume twice from the same checkpoint and compare train/batch of the next ten steps with the first "
        "run's",
    ),
    "run.worse_after_resume": Doubt(
        "single",
        (
            "an optimizer state that was not loaded: then the loss comes back within a few hundred steps",
            "other data after the resume",
        ),
        "evaluate the checkpoint alone, without a step: if the loss is high at once, the weights are wrong; "
        "if it is not, the optimizer or the data are",
    ),
    "run.updates_lost": Doubt(
        "agreeing",
        ("a learning rate that has come to its end, where updates are meant to be tiny",),
        "run a hundred steps with model.torch_dtype: float32 from the same checkpoint: the loss falls if "
        "rounding held it up",
    ),
    "run.layer_stopped": Doubt(
        "certain",
        ("a layer that was frozen on purpose", "a branch that this part of the data does not take"),
        "at step {since} print requires_grad and .grad of the layer's parameters: False is freezing, None is "
        "a cut in the graph, zeros a saturated activation behind it",
    ),
    "run.layer_vanishing": Doubt(
        "single",
        (
            "the same fault in a layer behind it: gradients flow from the output to the input",
            "a loss that is close to its floor",
        ),
        "run the batch of step {since} from the last checkpoint and compare the activations of the first "
        "layer named with those of the layer before it",
    ),
    "run.layer_exploding": Doubt(
        "single",
        ("one batch unlike the rest", "a learning rate that is too high for this layer"),
        "run the batch of step {since} from the checkpoint before it, and another batch: if only the first "
        "explodes it is the data, if both do it is the learning rate",
    ),
    "run.lr_too_high": Doubt(
        "single",
        (
            "batches so small that gradients are mostly noise",
            "data that gets harder on the way",
            "momentum (beta) too large for this batch",
        ),
        "a hundred steps from a checkpoint before step {since} with train.learning_rate: {third}: if it is "
        "the rate, the loss falls and consecutive gradients no longer oppose each other; if not, double the "
        "batch at the old rate",
    ),
    "run.packing_leak": Doubt(
        "shared",
        ("another order of the data", "another weight of each token, where a mean is taken over rows"),
        "perturb one packed document and look whether the logits of another move: pgs validate does",
    ),
    "run.data_quality": Doubt(
        "single",
        ("a learning rate at the edge of what is stable", "sources of very different difficulty"),
        "train again over the same steps with another seed: if the same rows spike, it is the data, if other "
        "ones do, it is the learning rate",
    ),
    "run.loss_spike": Doubt(
        "single",
        ("a step that went too far: then the batch before it did it",),
        "compute the loss of that batch with a checkpoint from before step {since}: high means that the "
        "batch is unlike the rest, ordinary means that the step before went too far",
    ),
    "run.nonfinite": Doubt(
        "certain",
        ("a metric that overflows while the model does not: look at the weights",),
        "run the batch of step {since} from the checkpoint before it under "
        "torch.autograd.set_detect_anomaly(True), in float32: if it is finite now, half precision overflowed",
    ),
    "run.nan_hidden": Doubt(
        "agreeing",
        ("a norm that overflows in half precision while every gradient is finite",),
        "look at the weights: any(p.isnan().any() for p in model.parameters())",
    ),
    "run.zero_loss_nan_norm": Doubt(
        "certain",
        ("a batch without a loss-bearing token, whose mean is 0/0 in the backward pass only",),
        "set logging_nan_inf_filter=False and run on from the checkpoint: the loss says NaN, or it is 0",
    ),
    "run.layer_imbalance": Doubt(
        "single",
        ("a block that is new among trained ones and has more to learn",),
        "two hundred steps with a tenth of the learning rate for that block alone: the others' loss must not "
        "get worse",
    ),
    "run.representation_collapse": Doubt(
        "single",
        ("a matrix that came with a low rank from pretraining", "a small matrix, whose rank is low anyway"),
        "sample twenty answers from this checkpoint and from the first one: repetition confirms it",
    ),
    "run.forgetting": Doubt(
        "shared",
        ("a model that is trained from random weights, where drift is no loss", "a task that needs it"),
        "evaluate this checkpoint and the first one on text that is not trained on: a rise of its loss "
        "confirms it",
    ),
    "run.source_overfitting": Doubt(
        "single",
        ("evaluation rows of that source that are unlike its training rows",),
        "count how often each source was passed over: more than three passes over one speak for it; train "
        "from the best step with half its weight",
    ),
    "run.overfitting": Doubt(
        "agreeing",
        ("evaluation data unlike the training data", "a learning rate that is too high late in the run"),
        "evaluate on a few hundred training rows: if their loss is far below the evaluation loss, it is "
        "overfitting",
    ),
    "run.evaluation_lost": Doubt(
        "certain",
        ("overflow in half precision in evaluation only",),
        "evaluate row by row and look which one is not finite; pgs validate counts its loss-bearing tokens",
    ),
    "run.entropy_collapse": Doubt(
        "single",
        ("answers that are meant to be all alike",),
        "sample eight answers to each of twenty prompts and count the distinct ones, now and at the first "
        "checkpoint",
    ),
    "run.lr_too_low": Doubt(
        "shared",
        (
            "nothing is left to learn from this data",
            "an optimizer that holds other tensors than the model's",
            "labels that say nothing (pgs inspect shows them)",
        ),
        "two hundred steps with train.learning_rate: {twice} on one batch alone: if even that loss does not "
        "fall, it is not the rate",
    ),
    "run.memory_grows": Doubt(
        "single",
        ("rows that get longer", "an allocator that has not settled"),
        "repeat one batch a hundred times: what still grows is held by the program, what stops came from the "
        "rows",
    ),
    "run.memory_pressure": Doubt(
        "agreeing",
        ("an allocator that keeps what it could give back: compare allocated with reserved memory",),
        "pgs profile with this configuration tells the peak of a step and what would lower it",
    ),
    "run.slow_throughput": Doubt(
        "single",
        ("another program on the same device", "evaluation and checkpoints counted as training"),
        "repeat one batch from memory fifty times: as slow as before is the device or the model, fast is the "
        "data",
    ),
    "run.failed": Doubt(
        "certain",
        ("an error that came after the run's real end",),
        "start again from the last checkpoint: an error at the same step comes from its batch, at another "
        "from the machine",
    ),
    "run.tracker_rows": Doubt(
        "certain", (), "compare the tracker's train/loss at these steps with pgs report RUN"
    ),
    "run.other_warnings": Doubt("certain", (), "read docs/alarms.md on the event, beside pgs report RUN"),
}
