"""What pathologies mean that a record tells by its events: of layers, ranks, steps, and how a run ended."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_ALARMS = "docs/alarms.md."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="run.no_gradients",
        title="The monitor saw no gradients",
        meaning="At a check no layer had a gradient.",
        why="Whatever goes wrong in a layer cannot be seen; the run is not, or only partly, monitored.",
        confirm="Print one parameter's .grad right before mon.step(loss).",
        fix="Call mon.step(loss) after loss.backward(), and clear gradients afterwards.",
        source=_ALARMS,
    ),
    Entry(
        check="run.rank_outlier",
        title="One rank's gradients stand apart",
        meaning="A rank's own gradient of a layer, before it is averaged, is far smaller or larger than the "
        "other ranks', or not finite.",
        why="The average over ranks hides it: what that rank trains on is lost, or drowns the others.",
        confirm="The event rank_outlier names rank, layer and size (pgs report RUN). Look at its rows.",
        fix="Take the rows that do it out of data.dataset, and give every rank rows of the same kind.",
        source="docs/alarms.md, Ranks that stand apart.",
    ),
    Entry(
        check="run.not_optimized",
        title="Parameters that no optimizer holds",
        meaning="Parameters get gradients, and nothing updates them.",
        why="They stay what they were, random if they are new, while the rest is trained around them.",
        confirm="Compare one of them before and after optimizer.step().",
        fix="Make the optimizer after the last change to the model, or call optimizer.add_param_group().",
        source="docs/alarms.md, No gradients, skipped steps, mixed precision.",
    ),
    Entry(
        check="run.never_trained",
        title="A layer that never had a gradient",
        meaning="At every check of the warm-up a layer that an optimizer holds had no gradient, or zeros.",
        why="It is not trained at all, and the loss still falls: the rest of the model learns to do without.",
        confirm="Run one batch, call backward() and look at .grad of its parameters.",
        fix="Take out what cuts it off the loss. With train.gradient_checkpointing and model.lora the "
        "embeddings need enable_input_require_grads(), which pgs train calls.",
        source="docs/alarms.md, When a layer alarm fires.",
    ),
    Entry(
        check="run.steps_skipped",
        title="Steps that were skipped",
        meaning="The gradient scaler of mixed precision, or a rule of the trainer, left out more steps than "
        "it needs to find its scale.",
        why="A skipped step teaches nothing. A run that skips all of them looks quiet.",
        confirm="Count them against the steps of the run; the loss scale goes down at each.",
        fix="model.torch_dtype: bfloat16 needs no loss scale. train.learning_rate: a third, if gradients "
        "grow; train.max_grad_norm: 1.0 acts after the scaler and does not help.",
        source="docs/alarms.md, No gradients, skipped steps, mixed precision. Micikevicius et al. 2018, "
        "Mixed Precision Training (arXiv 1710.03740), on loss scaling.",
    ),
    Entry(
        check="run.layer_stopped",
        title="A layer lost its gradient",
        meaning="A layer that had a gradient has none any more: it is None, or zero everywhere.",
        why="From that step on the layer is not trained, and the curve of the loss hardly shows it.",
        confirm="The alarm says since when and what was seen; look at the layer's requires_grad and .grad.",
        fix="Take out what cuts the layer off, and go on from a checkpoint from before the step "
        "(train.resume_from).",
        source="docs/alarms.md, When a layer alarm fires.",
    ),
    Entry(
        check="run.layer_vanishing",
        title="A layer's gradient vanished",
        meaning="A layer's gradient fell to a tenth of its own normal, or less, and stayed there.",
        why="The layer hardly learns; where all layers before one are silent, that one is dead.",
        confirm="The heatmap of pgs report RUN shows which layers went first.",
        fix="Go back to a checkpoint from before the step (train.resume_from) with train.learning_rate: a "
        "third. Look at the activations behind the first layer named.",
        source="docs/alarms.md, When a layer alarm fires.",
    ),
    Entry(
        check="run.layer_exploding",
        title="A layer's gradient exploded",
        meaning="A layer's gradient rose to ten times its own normal, or more, at a step or for good.",
        why="One such step can undo what was learned before; clipping then scales all other layers down.",
        confirm="The alarm or gradient_spike names layer, step and size; compare the loss of that step.",
        fix="train.max_grad_norm: 1.0 bounds single steps; train.learning_rate: a third if it comes again.",
        source="docs/alarms.md, When a layer alarm fires, Between two checks.",
    ),
    Entry(
        check="run.evaluation_lost",
        title="An evaluation loss that is not finite",
        meaning="An evaluation loss is NaN or infinite while the training loss is not.",
        why="The best checkpoint cannot be chosen, and early stopping compares with NaN.",
        confirm="Evaluate row by row; pgs validate counts the loss-bearing tokens of the evaluation set.",
        fix="Take rows without an answer out of data.eval_dataset, or data.max_seq_length: longer.",
        source="A mean over no tokens is 0/0. A problem people meet often in public issue threads.",
    ),
    Entry(
        check="run.memory_grows",
        title="Memory grows with every step",
        meaning="What is held in memory rose over the second half of the run, beyond doubt and by a fifth.",
        why="The run ends when there is none left, hours after it could have been seen.",
        confirm="health/cuda_allocated_gb or health/host_rss_gb against the step (pgs report RUN).",
        fix="Keep loss.item() and not the loss; data.num_workers: 0 shows whether the loaders keep what they "
        "read.",
        source="PyTorch's FAQ on memory: a tensor that is kept keeps the graph that made it.",
    ),
    Entry(
        check="run.failed",
        title="An error ended the run",
        meaning="The record or the log ends with an error.",
        why="What came after the last checkpoint is lost.",
        confirm="The program's own output has the whole error.",
        fix="Mend what it names. train.resume_from: auto goes on from the newest whole checkpoint.",
        source="The end in run.json, or the error in the log.",
    ),
    Entry(
        check="run.other_warnings",
        title="Warnings that no other finding tells of",
        meaning="The record has events of severity warning or worse that are no sign of another finding.",
        why="Each left its normal range and deserves a look.",
        confirm="pgs report RUN shows them beside the curves.",
        fix="By the event: docs/alarms.md says what each of them means.",
        source=_ALARMS,
    ),
)
