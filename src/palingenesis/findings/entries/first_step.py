"""What a few real steps on a few samples show, before a run."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_AGAIN = "Run pgs diagnose --mode full --json again and compare the numbers under first_steps."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="first_step.failed",
        title="A step of training ends with an error",
        meaning="Loading was possible, and the first optimizer steps were not.",
        why="The run would end in its first minute with the same error.",
        confirm="Start pgs train with --train.max_steps 1.",
        fix="Set what the error names; for memory see pgs profile.",
        source="The steps are those of the run: its model, data, objective and trainer.",
    ),
    Entry(
        check="first_step.loss_not_finite",
        title="The loss is no number before the first step",
        meaning="The cross-entropy of a few samples is NaN or infinite with the weights as they were loaded.",
        why="Every gradient is NaN, and after one step every weight.",
        confirm="Look for NaN in the weights: any(p.isnan().any() for p in model.parameters()).",
        fix="Set model.torch_dtype to float32; if it stays, take another copy of the model.",
        source="Overflow in half precision, or a damaged file; nothing else can be wrong before a step.",
    ),
    Entry(
        check="first_step.loss_differs",
        title="Training's loss is not that of the model's own logits",
        meaning="The cross-entropy that training reads from the LM head, a chunk at a time, differs from the "
        "one computed here from whole logits.",
        why="Another objective is trained than the one that is meant.",
        confirm=_AGAIN,
        fix="Set memory.chunked_loss, model.compile and model.use_liger_kernel to false, one after the "
        "other.",
        source="The two are the same by definition; the tolerance is that of the weights' number format.",
    ),
    Entry(
        check="first_step.loss_at_random",
        title="A pretrained model knows no more than chance does",
        meaning="The first loss is near ln(vocabulary), what guessing among all tokens gives.",
        why="Weights were not loaded (names that did not match, a file that is missing), or tokens mean "
        "something else to the model than to the tokenizer. Training would begin from nothing.",
        confirm="Generate a sentence with the model: it is noise.",
        fix="Set model.name_or_path to a folder with all weights and their own tokenizer. For a model that "
        "is meant to begin from nothing the finding means nothing.",
        source="A uniform guess over V tokens has a cross-entropy of ln V; pretrained models are below 4 on "
        "ordinary text. The bound is 0.8 ln V.",
    ),
    Entry(
        check="first_step.no_gradient",
        title="Trained parameters have no gradient",
        meaning="After a backward pass, .grad is None for parameters that are to be trained.",
        why="They never change, and the loss may still fall a little by the others: nothing tells.",
        confirm="After loss.backward(), list the names whose .grad is None.",
        fix="For adapters: activation checkpointing needs inputs that have a gradient "
        "(model.enable_input_require_grads()), or train.gradient_checkpointing false.",
        source="PyTorch's notes on torch.utils.checkpoint: with use_reentrant=True and no input that "
        "requires a gradient, no gradient is computed at all.",
    ),
    Entry(
        check="first_step.accumulation",
        title="Accumulated gradients are not those of the whole batch",
        meaning="The gradient of a step, in micro-batches of unequal numbers of loss-bearing tokens, differs "
        "from the gradient of all their rows at once.",
        why="A mean of means weighs tokens of short answers more; a loss that ignores the token count of the "
        "window makes the gradient as many times too long as there are micro-batches.",
        confirm=_AGAIN + " The ratio of the lengths is about N for N micro-batches that are summed.",
        fix="Divide each micro-batch's summed loss by the loss-bearing tokens of the whole window "
        "(num_items_in_batch in transformers).",
        source="'Bugs in LLM Training: Gradient Accumulation Fix' (Unsloth, 2024), and transformers issue "
        "34242.",
    ),
    Entry(
        check="first_step.optimizer_stale",
        title="The optimizer holds other parameters than the model",
        meaning="Parameters that the model trains are not in the optimizer, or the optimizer holds some that "
        "the model does not have.",
        why="The loss stays flat: gradients arrive at tensors that nothing updates.",
        confirm="Compare {id(p)} over optimizer.param_groups with model.parameters().",
        fix="Make the optimizer after the model was moved, adapted, tied or wrapped.",
        source="PyTorch's documentation of torch.optim: parameters must be the same objects at all times.",
    ),
    Entry(
        check="first_step.stays",
        title="A trained parameter does not move",
        meaning="It had a gradient in ten steps at the highest learning rate, its number format could hold "
        "the update, and it is bit for bit what it was.",
        why="It is not trained, whatever the loss does.",
        confirm="Keep a copy of the parameter and compare it after a step.",
        fix="See that the optimizer holds it, and that nothing writes it back.",
        source="Any optimizer here moves a parameter that has a gradient.",
    ),
    Entry(
        check="first_step.zero_gradient",
        title="A trained parameter has gradients of zero alone",
        meaning="In ten steps on a few samples nothing reached it.",
        why="With more data something may: an expert that these samples do not choose is no mistake. A part "
        "for images is never trained by text, and costs memory for its moments.",
        confirm="pgs diagnose with other samples in front.",
        fix="Name what is to be trained in model.lora.targets, or take a model without the part.",
        source="Mixture of experts: only chosen experts have a gradient.",
    ),
    Entry(
        check="first_step.rounds_away",
        title="All updates of a parameter round away",
        meaning="A parameter had gradients and did not move, and every step of the learning rate is less "
        "than half the distance between its numbers.",
        why="Weights of norms, which are near 1, stay what they are in bfloat16 below a rate of 0.002 or so. "
        "For a fine-tuning that is often no loss.",
        confirm="1.0 + 1e-5 in torch.bfloat16 is 1.0.",
        fix="Set model.torch_dtype to float32 if they are to learn; see config.updates_round_away for the "
        "rest.",
        source="bfloat16 has eight bits of precision; Zamirai et al. (arXiv 2010.06192).",
    ),
    Entry(
        check="first_step.same_rows",
        title="Processes train on the same rows",
        meaning="The batches of two processes, as they would be shared out over the run's processes, are the "
        "same.",
        why="Every card computes the same gradient: the run costs as many times as much and learns no "
        "faster.",
        confirm="Print the first input_ids on every process.",
        fix="Give every process its own share of the data: a DistributedSampler, or accelerate's prepare.",
        source="PyTorch's documentation of DistributedSampler.",
    ),
    Entry(
        check="first_step.schedule",
        title="The learning rate does not follow its schedule",
        meaning="The learning rates of the first steps are not those that the configuration says.",
        why="A scheduler that is stepped for every micro-batch, or on every process, is through N times too "
        "early: most of the run has a learning rate of almost nothing.",
        confirm="Compare learning_rates under first_steps with the schedule's formula.",
        fix="Step the scheduler once for each optimizer step.",
        source="accelerate's documentation of split_batches and of schedulers under several processes.",
    ),
    Entry(
        check="first_step.no_overfit",
        title="The loss of the same samples does not fall",
        meaning="Ten steps on the same few samples, at the highest learning rate, and their loss is not "
        "lower: the mean of the last three is less than 0.1% below the first, or above it.",
        why="A model that cannot learn two samples by heart learns nothing. If it rises, the learning rate "
        "is too high; if it stays, it is too low or updates round away.",
        confirm="overfit_losses under first_steps.",
        fix="Lower train.learning_rate to a tenth where it rises; raise it, or set model.torch_dtype to "
        "float32, where it stays.",
        source="Karpathy, 'A Recipe for Training Neural Networks' (2019): overfit one batch first.",
    ),
)
