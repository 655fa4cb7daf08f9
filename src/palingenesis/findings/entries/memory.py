"""What ``pgs profile`` says about memory."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_CONFIRM = (
    "Start the run and look at the most that PyTorch reserved after two steps "
    "(torch.cuda.max_memory_reserved()), or run benchmarks/device_memory.py, which holds the estimate "
    "against the card."
)

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="memory.does_not_fit",
        title="The step does not fit the card",
        meaning="The peak of one optimizer step, with what allocator, context and kernels add, is more than "
        "the card has; or the allocator finds no room for one of its tensors.",
        why="The run ends with an out-of-memory error: at its first step, or at the first batch of rows "
        "that are as long as data.max_seq_length allows, which can be hours later.",
        confirm=_CONFIRM,
        fix="Options that leave every number as it is come first: memory.chunked_loss true, more "
        "memory.loss_num_chunks, a smaller train.per_device_batch_size with more "
        "train.gradient_accumulation_steps, train.gradient_checkpointing true. Then train.optimizer "
        "adamw_8bit, parallel.strategy fsdp2 over several cards, or model.lora. pgs profile estimates "
        "each.",
        source="The step is traced with the model's own class and optimizer on fake tensors; "
        "docs/preflight.md says how, and how exact it is.",
    ),
    Entry(
        check="memory.tight",
        title="The step fits with little to spare",
        meaning="Less than 5% of the card is left above the estimate.",
        why="Evaluation, another process on the card, a newer library or fragmentation over thousands of "
        "steps of rows of different lengths can take that much, and the run ends then.",
        confirm=_CONFIRM,
        fix="Lower train.per_device_batch_size, raise train.gradient_accumulation_steps by as much, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment.",
        source="The 5% are this project's choice; expandable segments are described in PyTorch's notes on "
        "CUDA memory management.",
    ),
    Entry(
        check="memory.fits",
        title="The step fits the card",
        meaning="The peak of one optimizer step, with everything that is added to it, is less than the card "
        "has.",
        why="The run will not end for want of memory.",
        confirm=_CONFIRM,
        fix="Nothing is to be done.",
        source="The step is traced with the model's own class and optimizer on fake tensors; "
        "docs/preflight.md says how, and how exact it is.",
    ),
    Entry(
        check="memory.whole_gradients",
        title="Gradients are not split before the last micro-batch",
        meaning="Under parallel.strategy fsdp2 with train.gradient_accumulation_steps above 1, every rank "
        "holds whole gradients while micro-batches are accumulated.",
        why="Their memory does not shrink with the number of cards, unlike that of weights and optimizer "
        "states.",
        confirm="Compare pgs profile with --train.gradient_accumulation_steps 1.",
        fix="With more cards, set train.gradient_accumulation_steps to 1, and train.per_device_batch_size "
        "to what keeps the batch of a step the same.",
        source="transformers' trainer switches the reduction off (set_requires_gradient_sync) for all "
        "micro-batches but the last of a step.",
    ),
    Entry(
        check="memory.linear_attention",
        title="Linear attention is counted with its kernels",
        meaning="The model has layers of linear attention (the gated delta rule). transformers computes them "
        "with flash-linear-attention and causal-conv1d where these are installed, and else in a loop of its "
        "own. The estimate is that of the kernels.",
        why="The loop keeps many times as much for the backward pass and is much slower; packed rows are "
        "refused without the kernels. It is taken with no more than one line in the log.",
        confirm="python -c 'import fla, causal_conv1d' on the machine that trains; pgs profile with a card "
        "says what a step takes without them.",
        fix="pip install flash-linear-attention causal-conv1d on the machine that trains.",
        source="transformers' use_kernel_func_from_hub_with_fallback; what the kernels keep was read from "
        "flash-linear-attention 0.6 and held against its code (benchmarks/linear_attention.py).",
    ),
    Entry(
        check="memory.room_for_batch",
        title="More rows at once would fit",
        meaning="Some micro-batches of a step could be done as one.",
        why="A step of the same rows takes less time when fewer and larger kernels do it.",
        confirm="Compare train/tokens_per_sec of a few steps.",
        fix="Raise train.per_device_batch_size and divide train.gradient_accumulation_steps by as much.",
        source="The batch was traced as the given one was.",
    ),
)
