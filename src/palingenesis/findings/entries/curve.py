"""What is said of a loss curve by itself; ``findings/curve`` says how each is seen."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_MEASURED = "benchmarks/curves and docs/loss.md say how often it is seen, and how often wrongly."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="curve.nonfinite",
        title="The curve has losses that are no numbers",
        meaning="The log holds NaN or an infinite value as the loss.",
        why="One such step puts NaN into every weight that it reaches. If all later losses are NaN as well, "
        "what was trained is lost.",
        confirm="Load the last checkpoint and look for NaN in its parameters.",
        fix="train.resume_from: a checkpoint from before that step, with train.learning_rate at a third and "
        "train.max_grad_norm: 1.0.",
        source="The values stand in the log as they are; nothing is estimated.",
    ),
    Entry(
        check="curve.diverged",
        title="The loss rose and did not come back",
        meaning="The last losses are above the lowest level that the curve had been at, by many standard "
        "errors and by a part of the loss that matters. A rise while the learning rate is raised does not "
        "count.",
        why="Training has made the model worse from there on; what was best is an earlier checkpoint.",
        confirm="Plot the loss from a little before that step on (pgs loss --html FILE), with "
        "train/grad_norm beside it.",
        fix="train.resume_from: a checkpoint from before that step, with train.learning_rate at a third. If "
        "the data changes there, look at it with pgs inspect.",
        source=_MEASURED,
    ),
    Entry(
        check="curve.spikes",
        title="Spikes in the curve",
        meaning="Losses lie far above those before them, further than the tail of this curve's own noise "
        "reaches, and come back. Heavy tails and batches of a harder kind set the bar themselves.",
        why="A spike that is over after one step is mostly its batch; one that takes many steps has damaged "
        "weights or the optimizer's moments. Frequent ones are a habit that costs progress.",
        confirm="pgs loss RUN --spikes shows the batches of these steps, where the run kept them.",
        fix="train.max_grad_norm: 1.0; if the batches are broken take the rows out; if not, "
        "train.learning_rate: two thirds.",
        source="Tail of the noise by Hoaglin's h (1985) and Hill's estimator (1975). " + _MEASURED,
    ),
    Entry(
        check="curve.plateau",
        title="The loss stood still",
        meaning="For a stretch of steps the loss did not fall, although it fell before and, if the stretch "
        "does not last to the end, after. That learning stopped there explains the curve much better than "
        "any smooth fall does.",
        why="These steps were paid for and brought nothing. A loss that levels off smoothly is another "
        "matter and is told apart.",
        confirm="Plot train/lr, train/grad_norm and the share of skipped steps over the same steps.",
        fix="train.learning_rate and its schedule first (the rate may have been near zero there); twice the "
        "rate if it was as planned.",
        source=_MEASURED,
    ),
    Entry(
        check="curve.levelled_off",
        title="The loss has levelled off",
        meaning="Over at least the last quarter of the steps the loss changed by less than 3% of all that it "
        "fell, and its smooth law expects no more.",
        why="More steps of this kind bring next to nothing. Whether that is the floor of the task or of the "
        "learning rate, the curve alone cannot tell.",
        confirm="A hundred steps from the last checkpoint with three times the learning rate, then with a "
        "third: if neither falls, it is the floor.",
        fix="Stop here, or change something other than the number of steps.",
        source=_MEASURED,
    ),
    Entry(
        check="curve.periodic",
        title="A pattern comes back every so many steps",
        meaning="The losses hold a pattern of fixed length, found as a line in their spectrum that stands "
        "far above its neighbours.",
        why="Loss should not know what step it is. A length of one epoch is rows seen again in the same "
        "order; a length of a few steps is micro-batches, ranks or sources that take turns.",
        confirm="Compare the length with the steps of an epoch, the accumulation, and the number of sources "
        "and shards.",
        fix="Shuffle anew in every epoch (another seed each), and mix sources within a batch.",
        source=_MEASURED,
    ),
    Entry(
        check="curve.restarted",
        title="The log holds more than one start",
        meaning="Steps go back: the run was resumed, or started again into the same log.",
        why="Steps stand twice in the log. A tracker may show either version.",
        confirm="Look at the log around the named steps.",
        fix="Nothing, if the resume was meant.",
        source="The order of the steps in the log.",
    ),
    Entry(
        check="curve.starts_at_chance",
        title="The first loss is that of a guess",
        meaning="The first loss is the logarithm of a vocabulary in wide use: every token is as likely as "
        "any other.",
        why="Right for training from scratch. A pretrained model begins at 1 to 4: its weights were not "
        "loaded.",
        confirm="Evaluate the model before the first step, or run pgs diagnose --mode full.",
        fix="model.name_or_path: a folder that holds the weights; heed the warnings about newly initialised "
        "ones.",
        source="The cross-entropy of a uniform guess among V tokens is ln V.",
    ),
)
