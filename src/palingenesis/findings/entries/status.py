"""What ``pgs monitor`` says about a run that goes on."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_LIMIT = "The limit is a convention of this project: findings.status.StatusLimits."
_TABLE = "The project's table of pathologies."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="status.error",
        title="The log holds an error",
        meaning="A line of the log is an error: an exception, memory that ran out, a collective that timed "
        "out.",
        why="Critical if nothing was logged after it: the run ended there. A warning if the run went on.",
        confirm="Read the lines before it; the first error of several is the cause, the rest follow from it.",
        fix="Take its cause away, then train.resume_from: auto goes on from the last checkpoint.",
        source="The message itself.",
    ),
    Entry(
        check="status.nonfinite",
        title="A number was NaN or infinite",
        meaning="A metric of training, of an evaluation or of the model's health was no number at some row. "
        "The evidence has the first step of each. Critical if the last value of one still is.",
        why="NaN in the weights never goes away. A single row may be a step that was skipped.",
        confirm="The values after it: a loss that is finite again for many rows means that weights survived.",
        fix="train.resume_from: a checkpoint of before that step, train.learning_rate: a third, "
        "train.max_grad_norm: 1.0. run.nonfinite says more on causes.",
        source="IEEE 754; docs/alarms.md, The loss.",
    ),
    Entry(
        check="status.loss_scale",
        title="A loss scale finds its level",
        meaning="Gradient norms were not finite at the first rows only, or at steps that the log tells of as "
        "skipped, while the loss was.",
        why="In half precision the loss is scaled up until gradients overflow; such a step is left out and "
        "the scale halved. A few of them are how it works.",
        confirm="The loss scale in the log, if it is there, halves at these steps.",
        fix="Nothing is to be done. model.torch_dtype: bfloat16 needs no loss scale.",
        source="torch.amp.GradScaler begins at 65,536 and doubles every 2,000 steps.",
    ),
    Entry(
        check="status.nonfinite_other",
        title="A number of unknown meaning was NaN or infinite",
        meaning="The log has a metric that this program does not know, and it was no number at some row.",
        why="Some programs write NaN for a metric that does not apply; others mean it.",
        confirm="Look up the metric in the trainer that wrote the log.",
        fix="Nothing is to be done if NaN stands for none.",
        source="Lightning's CSV logger and pandas write what is missing as NaN or leave it blank.",
    ),
    Entry(
        check="status.zero_loss",
        title="The loss is exactly 0",
        meaning="The loss fell to exactly 0 from one row to the next and stays there, or never was anything "
        "else.",
        why="No training does that. A filter replaced NaN by 0, or every label is masked.",
        confirm="The gradient norm of these rows: NaN means the former, 0 the latter.",
        fix="logging_nan_inf_filter=False in a transformers Trainer; data.max_seq_length and "
        "model.chat_template if answers are masked or cut (pgs validate).",
        source="transformers, TrainingArguments.logging_nan_inf_filter, which is on by default.",
    ),
    Entry(
        check="status.no_loss",
        title="The log holds no loss",
        meaning="Rows could be read, but none of their metrics is a training loss.",
        why="How training goes cannot be said from learning rates and speeds.",
        confirm="The evidence lists the metrics that the log has.",
        fix="Log the training loss, under a name such as loss or train/loss.",
        source="docs/logs.md lists the names that are understood.",
    ),
    Entry(
        check="status.diverging",
        title="The loss goes up",
        meaning="Over the last part of the run the loss surely rose by more than 5%, or it surely is more "
        "than 10% above where it once was.",
        why="What was learned is being lost; the longer it goes on, the older the checkpoint to go back to.",
        confirm="pgs loss on the same log shows the curve. Data that becomes harder on purpose (a "
        "curriculum, "
        "longer rows) does the same.",
        fix="train.resume_from: a checkpoint of before the rise, train.learning_rate: a third, "
        "train.max_grad_norm: 1.0.",
        source="Sen (1968) for the slope's interval. " + _LIMIT,
    ),
    Entry(
        check="status.skipped",
        title="Many steps are skipped",
        meaning="More than 5% of the steps did not change the weights: the loss scale overflowed, or a spike "
        "rule took them out. Steps at the very beginning, in which a loss scale finds its level, do not "
        "count.",
        why="The run costs the same and learns less; above half of the steps it hardly learns at all.",
        confirm="Count the lines that say so. The gradient norm before them tells overflow from spikes.",
        fix="model.torch_dtype: bfloat16 instead of float16; train.learning_rate: a third; bad rows out of "
        "the data (pgs validate).",
        source=_TABLE,
    ),
    Entry(
        check="status.crash_loop",
        title="The run fails again and again at the same place",
        meaning="The last starts got no further than the one before them.",
        why="Starting it again costs time and changes nothing.",
        confirm="The lines before each start in the log.",
        fix="Take the cause away: the batch of that step if it is always the same one, memory if it ran out, "
        "a worn-out checkpoint.",
        source=_LIMIT,
    ),
    Entry(
        check="status.restarted",
        title="The run was started again",
        meaning="The log goes on from an earlier step than it had reached.",
        why="Steps since the last checkpoint were done twice; their first version does not count here.",
        confirm="The steps in the log, which go back.",
        fix="Nothing is to be done. train.save_steps: fewer loses fewer steps.",
        source="The log itself.",
    ),
    Entry(
        check="status.stalled",
        title="Nothing is written any more",
        meaning="The log has not grown for five times the usual time between rows and twice the longest "
        "silence so far, and the run has not ended by its own account.",
        why="A collective that waits for a rank that is gone, or a data loader that hangs, costs machines by "
        "the hour and says nothing.",
        confirm="py-spy dump --pid PID shows what each process waits for; nvidia-smi whether devices work.",
        fix="End what hangs and go on with train.resume_from: auto. Where the log does not tell that a run "
        "has ended, this may be just that.",
        source="torch.distributed gives up on a collective after 10 (NCCL) or 30 minutes (gloo). " + _LIMIT,
    ),
    Entry(
        check="status.slower",
        title="The run has become slower",
        meaning="The tokens per second of the last rows are surely more than 30% below those before. "
        "Seconds a "
        "step are not judged: rows differ in length.",
        why="The same result costs more time.",
        confirm="train/tokens_per_sec over the run. Another program on the machine, heat and a slow file "
        "system show in nvidia-smi, top and iostat.",
        fix="data.num_workers: 4 if the device waits for data; end what else runs there.",
        source=_LIMIT,
    ),
    Entry(
        check="status.not_monitored",
        title="The monitor did not see all gradients",
        meaning="The record's own verdict is NOT MONITORED or PARTLY MONITORED.",
        why="Nothing can be said of layers whose gradients were not seen; a loss that falls proves nothing "
        "of them.",
        confirm="pgs report RUN --format text names the layers and the reason.",
        fix="Call step() after loss.backward() and before optimizer.step(), on every rank.",
        source="docs/record.md, verdicts.",
    ),
    Entry(
        check="status.warnings",
        title="Warnings about the run",
        meaning="The log holds warnings that say something of the run's health: alarms of the monitor, "
        "overflows, time-outs, memory.",
        why="Whoever wrote the warning knew more at that moment than the log shows.",
        confirm="Read them: the evidence has each kind once, the most recent first.",
        fix="pgs report RUN shows the events of a run folder with their layers; pgs diagnose --mode post "
        "--log_file FILE looks for causes.",
        source="The log itself.",
    ),
    Entry(
        check="status.remarks",
        title="Warnings that say nothing of the run",
        meaning="Other programs warned of things such as options that will go away.",
        why="They do not change this run.",
        confirm="Read them: the evidence has each kind once.",
        fix="Nothing is to be done.",
        source="The log itself.",
    ),
    Entry(
        check="status.ended_early",
        title="The run ended before its last step",
        meaning="The log says that training is over, at a step before the last one planned.",
        why="It may be as planned: a limit of time, or no better evaluation for a while.",
        confirm="The last lines of the log.",
        fix="Nothing is to be done if it was meant to.",
        source="The log itself.",
    ),
    Entry(
        check="status.unread",
        title="Much of the log could not be read",
        meaning="More than half of the lines are not of the form that the log was recognised by.",
        why="There may be rows among them that this program does not know how to read.",
        confirm="docs/logs.md says what each form can and cannot show.",
        fix="Nothing is to be done if they are another program's.",
        source=_LIMIT,
    ),
)
