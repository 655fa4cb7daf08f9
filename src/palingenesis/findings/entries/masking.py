"""What the masks of samples can have wrong with them."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_INSPECT = "pgs inspect --index LINE shows the row token by token; the marked text is what is trained."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="masking.no_loss_tokens",
        title="Samples in which nothing bears loss",
        meaning="No token of these samples has a label. The evidence says where they were lost: to "
        "truncation (the answer begins after data.max_seq_length), to weights (every answer has "
        "weight 0), to turns (data.last_turn_only leaves out the answers that are trained), or to"
        " the collator.",
        why="A batch of nothing but such samples has a loss of 0/0: NaN, or a loss and a gradient "
        "norm of exactly 0. Training here leaves them out; an evaluation elsewhere becomes NaN.",
        confirm=_INSPECT,
        fix="Raise data.max_seq_length, set data.last_turn_only to false, or delete the rows, as the "
        "cause says.",
        source="PyTorch's cross_entropy with reduction mean over no target is NaN: "
        "https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
    ),
    Entry(
        check="masking.all_loss",
        title="Conversations in which everything bears loss",
        meaning="Every token but the first is trained, those of the user included; at most those that "
        "also pad are masked.",
        why="The model learns to write the user's part as well, and most of the gradient comes from "
        "text that it never has to produce.",
        confirm=_INSPECT,
        fix="Set model.chat_template to a template with {% generation %} marks around answers, or use"
        " a collator that keeps the labels it is given.",
        source="Labels that are a copy of the input are the default of transformers' "
        "DataCollatorForLanguageModeling: "
        "https://huggingface.co/docs/transformers/main_classes/data_collator",
    ),
    Entry(
        check="masking.round_trip",
        title="What is trained is not the assistant's messages",
        meaning="The tokens that bear loss, decoded, were compared with the messages of the assistant. "
        "They differ: the mask begins late, ends early, or covers something else.",
        why="Every masking mistake shows up here, whatever its cause. The model learns answers "
        "without their first word, or text that is not its own.",
        confirm=_INSPECT,
        fix="Set model.chat_template to a template with {% generation %} marks around answers. With a"
        " collator of your own, mend it there.",
        source="The check follows from what a mask is for: decoding its tokens must give the answers back.",
    ),
    Entry(
        check="masking.header_trained",
        title="The header before an answer is trained",
        meaning="The tokens that bear loss begin with what the template puts before the answer, such as "
        "the name of the role.",
        why="When the model is used, that header is given. Training it spends gradient on tokens that"
        " are always right and hides that answers are learned badly: the loss looks low.",
        confirm=_INSPECT,
        fix="Set model.chat_template to a template whose prompt for the next answer ends where the "
        "answer begins, or whose {% generation %} marks begin after the header.",
        source="The generation prompt of chat templates: "
        "https://huggingface.co/docs/transformers/chat_templating",
    ),
    Entry(
        check="masking.end_of_turn_untrained",
        title="The token that ends an answer is not trained",
        meaning="Answers are trained without the token that ends them. Where the same token also pads, "
        "the usual cause is a collator that masks it wherever it stands.",
        why="The model never learns to stop: it goes on after its answer, often as the user.",
        confirm=_INSPECT,
        fix="Give the tokenizer a pad_token of its own and set model.name_or_path to where it is "
        "saved, mask padding by attention_mask, or set model.chat_template to a template that "
        "ends answers with a token of its own.",
        source="transformers' language modelling collator masks every token equal to pad_token_id: "
        "https://huggingface.co/docs/transformers/main_classes/data_collator",
    ),
    Entry(
        check="masking.pad_trained",
        title="Padding bears loss",
        meaning="Positions that the attention mask calls padding have labels.",
        why="The loss counts tokens that are not there; the model learns to go on with padding, and "
        "the mean is divided by too many tokens.",
        confirm="Look at labels where attention_mask is 0 in a batch of more than one row.",
        fix="Use training's own collator, or set labels to -100 where attention_mask is 0. "
        "train.per_device_batch_size 1 hides the fault and does not mend it.",
        source="-100 is the index that cross_entropy ignores: "
        "https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
    ),
    Entry(
        check="masking.labels_shifted",
        title="Labels are not the tokens at their places",
        meaning="Where a label is set, it is another token than the input's at the same place.",
        why="Causal language models of transformers shift labels themselves. Shifted before, they are"
        " shifted twice, and the model learns to predict the token after the next.",
        confirm="Compare labels with input_ids where labels are not -100: they must be equal.",
        fix="Use training's own collator, or leave the shifting to the model. data.packing has no "
        "part in it.",
        source="https://huggingface.co/docs/transformers/tasks/language_modeling",
    ),
    Entry(
        check="masking.template_refused",
        title="The chat template cannot be trained with",
        meaning="Where answers begin and end cannot be told for certain from what the template writes; "
        "the message says why.",
        why="Guessing would train headers, or leave out the end of a turn, and the loss curve would "
        "look fine.",
        confirm="Render a conversation with tokenizer.apply_chat_template(messages, tokenize=False) and "
        "look for what ends an answer.",
        fix="Set model.chat_template to a template with {% generation %} marks around answers and "
        "their end of turn; data.last_turn_only helps where only earlier answers are uncertain.",
        source="docs/data.md says how answers are found, and what is refused.",
    ),
    Entry(
        check="masking.rows_refused",
        title="Rows that the chat template does not take",
        meaning="The template raises an error for these rows, or does not write them as they are: a "
        "system message where it knows none, tool calls that it leaves out.",
        why="The rows are left out of training. If they are a kind of their own, such as all tool "
        "calls, the model never sees that kind.",
        confirm="Render the row with tokenizer.apply_chat_template(messages, tokenize=False).",
        fix="Set model.chat_template to a template that takes them, or change the rows: a system "
        "message can go into the first question. preprocess.max_bad_rows_pct says how many may be"
        " left out.",
        source="docs/data.md, bad rows.",
    ),
    Entry(
        check="masking.little_loss",
        title="Next to no token bears loss",
        meaning="The share of loss-bearing tokens is far below what conversations usually have.",
        why="Nearly all computing goes into context. A step has few targets, so its gradient is noisy"
        " for what it costs.",
        confirm=_INSPECT,
        fix="Shorten the context, or set data.packing to true so that nothing is lost to padding on "
        "top of it.",
        source="Counted here; train/tokens_per_sec counts loss-bearing tokens as well.",
    ),
)
