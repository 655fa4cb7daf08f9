"""What is said of a configuration that can be run and should not be."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_SHOW = (
    "pgs config --config FILE prints every option with its value; pgs diagnose --json prints the run's steps."
)

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="config.not_checked",
        title="A part could not be checked",
        meaning="One part of the examination needs something that could not be had: the model, its "
        "tokenizer, the data, or an option that says how many cards there are.",
        why="What was not checked is not healthy; nothing is known of it, and training may stop at the same "
        "point.",
        confirm="Run the command of that part alone: pgs validate for masks and data, pgs profile for "
        "memory.",
        fix="Set the option that the message names, or give a local folder in place of a hub name.",
        source="This project's rule: a report claims no more than was looked at.",
    ),
    Entry(
        check="config.learning_rate_high",
        title="The learning rate is above what such a model takes",
        meaning="train.learning_rate is higher than any that is in use for models of this size, trained this "
        "way.",
        why="The loss rises or becomes NaN within the first hundred steps, or the model forgets what it "
        "knew.",
        confirm="pgs diagnose --mode full: the loss of two samples must fall at that rate.",
        fix="Set train.learning_rate to what the finding proposes, a fifth of the bound; for adapters 2e-4.",
        source="Published recipes, the bounds several times above them. Every weight: SmolLM2 135M 1e-3 and "
        "1.7B 3e-4 (Hugging Face's alignment handbook), Llama 2 chat 2e-5 (arXiv 2307.09288), Tulu 3 8B 5e-6 "
        "and 70B 2e-6 (arXiv 2411.15124). Adapters: QLoRA 2e-4 up to 13B, 1e-4 above (arXiv 2305.14314). Toy "
        "models take 1e-2 and more. The bounds are fields of SanityLimits.",
    ),
    Entry(
        check="config.learning_rate_low",
        title="The learning rate is too low to train anything",
        meaning="train.learning_rate is below what moves weights in a run of ordinary length, for this "
        "optimizer and this kind of training.",
        why="The loss stays where it is and the money is spent. Adapters begin at zero and need about ten "
        "times the rate of whole weights; SGD has no moments that scale its steps.",
        confirm="pgs diagnose --mode full: the loss of two samples must fall in ten steps.",
        fix="Set train.learning_rate to what the finding proposes.",
        source="Adapters against whole weights: 'LoRA Without Regret' (Thinking Machines, 2025) finds a "
        "factor of about ten. Lowest published rates for whole weights are near 1e-6 (Tulu 3, arXiv "
        "2411.15124).",
    ),
    Entry(
        check="config.small_batch",
        title="An optimizer step sees too few rows",
        meaning="train.per_device_batch_size times train.gradient_accumulation_steps times the processes is "
        "less than four.",
        why="The gradient of one or two conversations is mostly noise, and Adam divides it by its size: "
        "every step is as long as ever, in a random direction.",
        confirm="Watch health/gns: the noise scale is far above the batch.",
        fix="Raise train.gradient_accumulation_steps: it costs no memory.",
        source="McCandlish et al., 'An Empirical Model of Large-Batch Training' (arXiv 1812.06162). That "
        "four is the least is this project's choice.",
    ),
    Entry(
        check="config.few_steps",
        title="The run has hardly any optimizer steps",
        meaning="The data, the epochs and the batch make fewer than twenty steps.",
        why="Warm-up and schedule have no room, Adam's second moment (a mean over about a thousand steps) "
        "knows nothing yet, and the monitor has no baseline to judge by.",
        confirm=_SHOW,
        fix="Lower train.gradient_accumulation_steps, raise train.epochs, or give more data.",
        source="Adam's time constant is 1/(1 - 0.999) steps (arXiv 1412.6980). That twenty is the least is "
        "this project's choice.",
    ),
    Entry(
        check="config.long_warmup",
        title="The warm-up takes a large part of the run",
        meaning="train.warmup_ratio is above 0.3.",
        why="Most of the run has less than its learning rate, and the peak comes when little data is left.",
        confirm="train/lr in the record still rises late in the run.",
        fix="Set train.warmup_ratio to 0.03 to 0.1.",
        source="Published recipes use 0.03 (Tulu 3, arXiv 2411.15124) to 0.1 (Hugging Face's alignment "
        "handbook).",
    ),
    Entry(
        check="config.data_repeated",
        title="The data is gone over many times",
        meaning="train.epochs, or train.max_steps over the rows that there are, make more than six passes.",
        why="The model learns the answers by heart: eval/loss rises while train/loss falls.",
        confirm=_SHOW,
        fix="Set train.epochs to 2 or 3, lower train.max_steps, or give more data.",
        source="Muennighoff et al., 'Scaling Data-Constrained Language Models' (arXiv 2305.16264): repeated "
        "data is worth almost as much as new for about four passes, and little after.",
    ),
    Entry(
        check="config.eval_never",
        title="The evaluation data is never looked at",
        meaning="data.eval_every is beyond the last step.",
        why="There is no eval/loss and no best checkpoint.",
        confirm=_SHOW,
        fix="Set data.eval_every to a quarter of the run's steps.",
        source="The trainer evaluates at multiples of data.eval_every and at no other step.",
    ),
    Entry(
        check="config.eval_costs",
        title="Evaluation takes longer than training",
        meaning="The rows of one evaluation, a forward pass each, take more time than the steps between two.",
        why="Most of the GPU hours go into evaluation.",
        confirm="Compare train/eval_s with train/step_time_s in the record.",
        fix="Set data.eval_samples to a few hundred, or raise data.eval_every.",
        source="A backward pass costs about two forward passes (Kaplan et al., arXiv 2001.08361).",
    ),
    Entry(
        check="config.save_never",
        title="No checkpoint is written before the end",
        meaning="train.save_steps is beyond the last step of a run of a hundred steps or more.",
        why="An interruption loses the whole run.",
        confirm=_SHOW,
        fix="Set train.save_steps to a fifth of the run's steps.",
        source="The trainer saves at multiples of train.save_steps and at the end.",
    ),
    Entry(
        check="config.health_never",
        title="The monitor's slower looks never happen",
        meaning="logging.check_every, logging.health_tier2_every or logging.health_tier3_every is beyond the "
        "last step.",
        why="A run of 50 steps has no stable rank and no drift where they are measured every 100 steps, and "
        "no alarm where no check was made.",
        confirm=_SHOW,
        fix="Set the option to half of the run's steps or less, a multiple of train.logging_steps.",
        source="docs/signals.md: what is due every N steps happens at multiples of N.",
    ),
    Entry(
        check="config.whole_logits",
        title="Whole logits are kept",
        meaning="memory.chunked_loss is false, and the logits of a micro-batch take gigabytes.",
        why="They are often the peak of the whole step, and nothing needs them whole.",
        confirm="pgs profile with --memory.chunked_loss true and false.",
        fix="Set memory.chunked_loss to true: no number of the run changes.",
        source="Positions times vocabulary times 10 bytes: logits in bf16, in fp32, and their gradient; see "
        "also Cut Cross-Entropy (arXiv 2411.09009).",
    ),
    Entry(
        check="config.few_chunks",
        title="One chunk of logits is large",
        meaning="Logits divided by memory.loss_num_chunks still take more than 4 GB.",
        why="The chunk is the peak of the step.",
        confirm="pgs profile with a larger --memory.loss_num_chunks.",
        fix="Raise memory.loss_num_chunks: no number of the run changes.",
        source="Positions times vocabulary times 10 bytes, by the number of chunks.",
    ),
    Entry(
        check="config.lora_targets",
        title="Names of layers for adapters match nothing",
        meaning="Some of model.lora.targets are the end of no module's name, or name layers that take no "
        "adapter.",
        why="Those layers are not trained. peft refuses only if none matches.",
        confirm="Print [name for name, _ in model.named_modules()].",
        fix="Set model.lora.targets to all-linear, or to names from the list in the finding.",
        source="peft's rule: a target is a module's whole name or its end after a dot "
        "(LoraConfig.target_modules).",
    ),
    Entry(
        check="config.trainable_share",
        title="Adapters are as large as a good part of the model",
        meaning="The adapters have more than a fifth as many parameters as the model.",
        why="They cost about as much memory and time as training every weight, in a smaller space.",
        confirm="Count them: print_trainable_parameters() of peft's model.",
        fix="Lower model.lora.rank, or set model.lora to null.",
        source="The LoRA paper (arXiv 2106.09685) trains well below 1%; that a fifth is too much is this "
        "project's choice.",
    ),
    Entry(
        check="config.updates_round_away",
        title="Updates are smaller than bfloat16 can hold",
        meaning="Adam moves a weight by about the learning rate. For most of the model's weights that is "
        "less than half the distance to the next bfloat16 number, so they stay as they are. The share was "
        "computed from the weights themselves.",
        why="Only the smallest weights learn: the loss reaches a plateau early. The monitor shows it in a "
        "run as run.updates_lost.",
        confirm="Add train.learning_rate to a weight in torch.bfloat16 and compare.",
        fix="Set model.torch_dtype to float32, train adapters with model.lora, or raise train.learning_rate.",
        source="Zamirai et al., 'Revisiting BFloat16 Training' (arXiv 2010.06192). It is told from 50% of "
        "the weights on, and a warning from 95%, where less than one weight in twenty moves.",
    ),
    Entry(
        check="config.disk",
        title="Checkpoints do not fit on the disk",
        meaning="train.keep_checkpoints checkpoints with optimizer states, one more being written, and the "
        "model need more than is free at train.output_dir.",
        why="The run ends, hours in, with a checkpoint that is half written.",
        confirm="df -h at train.output_dir, against the sizes in the finding.",
        fix="Set train.output_dir to a larger disk, or train.keep_checkpoints to 2.",
        source="Trained parameters times the bytes of a weight and of the optimizer's moments.",
    ),
    Entry(
        check="config.special_tokens",
        title="Model and tokenizer disagree on special tokens",
        meaning="A number that the model's config.json calls the beginning or the end of a text is an "
        "ordinary token in the tokenizer.",
        why="It is probably the tokenizer of another model: every token then means something else to the "
        "model.",
        confirm="tokenizer.convert_ids_to_tokens(model.config.eos_token_id).",
        fix="Set model.name_or_path to a folder whose tokenizer was saved with its model.",
        source="config.json and tokenizer_config.json of one checkpoint are written together.",
    ),
    Entry(
        check="config.tokenizer_smaller",
        title="The tokenizer is far smaller than the model's vocabulary",
        meaning="The embedding has over a quarter more rows than the tokenizer has tokens.",
        why="Families round up to a multiple of 64 or so; a gap like this means the tokenizer of another "
        "model.",
        confirm="Compare len(tokenizer) with vocab_size in config.json.",
        fix="Set model.name_or_path to a folder whose tokenizer was saved with its model.",
        source="Published models: Qwen3 has 151,936 rows for 151,669 tokens, Phi-3 32,064 for 32,011. That a "
        "quarter is too much is this project's choice.",
    ),
    Entry(
        check="config.head_missing",
        title="The LM head is in none of the model's files",
        meaning="config.json says that head and embedding are two tables, and only one was saved.",
        why="The head would begin as random numbers; pgs train refuses, other trainers only warn.",
        confirm="List the keys of the safetensors files.",
        fix="Set tie_word_embeddings to true in config.json if the model was trained so, or save it anew.",
        source="transformers initialises missing weights at random, with a warning.",
    ),
)
