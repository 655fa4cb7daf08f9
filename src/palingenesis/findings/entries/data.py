"""What rows of data can have wrong with them."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

_INSPECT = "pgs inspect --index LINE shows the row token by token; the marked text is what is trained."

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="data.broken_json",
        title="Lines that are no JSON",
        meaning="These lines could not be read; the others were checked.",
        why="They are left out of training. A file that was cut off while it was written ends with "
        "one; a file of another format has many.",
        confirm='python -c "import json,sys; json.loads(sys.stdin.readline())" with the line.',
        fix="Write the lines anew. preprocess.max_bad_rows_pct 0 makes training refuse such a file.",
        source="https://jsonlines.org",
    ),
    Entry(
        check="data.missing_field",
        title="Rows without messages",
        meaning="The field that holds the messages is not among the names that are known, or a message "
        "lacks its role or content. The evidence lists the fields that the rows have.",
        why="Rows without messages are left out of training.",
        confirm="Look at the row in the file.",
        fix="Set data.messages_field to the field, or rename it.",
        source="docs/data.md, rows.",
    ),
    Entry(
        check="data.bad_value",
        title="Rows with something of the wrong kind",
        meaning="A value is there and cannot be what it should be: an unknown role, an image where text "
        "is needed, a weight of 0.5.",
        why="The rows are left out of training.",
        confirm="Look at the row in the file; the message names the value.",
        fix="Mend the rows. preprocess.max_bad_rows_pct says how many may be left out.",
        source="docs/data.md, rows.",
    ),
    Entry(
        check="data.role_order",
        title="Messages in an order that no conversation has",
        meaning="Two turns of the same side follow each other, a conversation begins with an answer, or "
        "it ends without one.",
        why="The rows are left out: most templates would render them, and the model would learn turns"
        " that never occur.",
        confirm="Look at the roles of the row.",
        fix="Join turns of the same side, cut what comes after the last answer, or delete the rows. "
        "preprocess.max_bad_rows_pct says how many may be left out.",
        source="docs/data.md, rows.",
    ),
    Entry(
        check="data.empty_answer",
        title="Answers without text",
        meaning="An answer of these rows is empty, or nothing but blanks, and calls no tool.",
        why="Trained on, the model learns to end its turn at once. The rows are left out.",
        confirm="Look at the answer in the file.",
        fix="Delete the rows, or give the answer weight 0. preprocess.max_bad_rows_pct says how many "
        "may be left out.",
        source="docs/data.md, rows.",
    ),
    Entry(
        check="data.control_token",
        title="Text that holds a control token",
        meaning="A message holds the text of a token that the template uses, such as the one that ends a "
        "turn.",
        why="The tokenizer would read it as that token: a turn would end in the middle of a message. "
        "The rows are left out.",
        confirm="Search the row for the token that the message names.",
        fix="Write the token differently in the text, or delete the rows. preprocess.max_bad_rows_pct"
        " says how many may be left out.",
        source="Injection of special tokens through text: "
        "https://huggingface.co/docs/transformers/chat_templating",
    ),
    Entry(
        check="data.too_many_bad_rows",
        title="More bad rows than training allows",
        meaning="The share of rows that are left out is above preprocess.max_bad_rows_pct.",
        why="Training refuses to start.",
        confirm="pgs validate --all counts every row.",
        fix="Mend the rows, or raise preprocess.max_bad_rows_pct.",
        source="docs/configuration.md.",
    ),
    Entry(
        check="data.answers_cut",
        title="Answers that are cut off",
        meaning="Rows are longer than data.max_seq_length and lose an answer, or its end, when they are cut.",
        why="The model learns answers that stop in the middle of a sentence without an end of turn; "
        "where all is lost the row is left out. Checks made before the cut do not see it.",
        confirm=_INSPECT,
        fix="Raise data.max_seq_length, which costs memory, or shorten the rows.",
        source="TRL cuts silently at max_length: https://huggingface.co/docs/trl/sft_trainer",
    ),
    Entry(
        check="data.longer_than_model",
        title="Rows longer than the model's context",
        meaning="Samples have more tokens than max_position_embeddings of the model's configuration.",
        why="Positions beyond it were never trained; some models fail there, others give garbage.",
        confirm="Compare max_position_embeddings in config.json with the longest row.",
        fix="Set data.max_seq_length to the model's positions, or configure rotary scaling in the model.",
        source="https://huggingface.co/docs/transformers/model_doc/llama",
    ),
    Entry(
        check="data.duplicates",
        title="The same sample more than once",
        meaning="Samples have the same tokens as another one.",
        why="They count several times: the model memorises them, and a split of the data puts copies "
        "on both sides.",
        confirm="Compare the lines that are named.",
        fix="Delete the copies, or leave them if more weight for them is wanted; several sources can "
        "be weighted with data.sources instead.",
        source="Lee et al., Deduplicating Training Data Makes Language Models Better, arXiv 2107.06499.",
    ),
    Entry(
        check="data.eval_leak",
        title="Evaluation samples that are trained on",
        meaning="Samples of the evaluation data have the same tokens as samples of the training data.",
        why="eval/loss then measures memory: it falls while the model gets no better, and the best "
        "checkpoint is the most overfitted one.",
        confirm="Search the training file for the text of the lines that are named.",
        fix="Set data.eval_dataset to rows that data.dataset does not have.",
        source="Lee et al., arXiv 2107.06499, on overlap between train and test.",
    ),
    Entry(
        check="data.mojibake",
        title="Text that was decoded wrongly",
        meaning="UTF-8 was read as Latin-1 or Windows-1252 somewhere before (Ã© for é), or bytes were "
        "replaced by the replacement character.",
        why="The model learns to write it.",
        confirm=_INSPECT,
        fix="Decode the source anew, and set data.dataset to the mended file; the package ftfy mends "
        "most of it.",
        source="https://ftfy.readthedocs.io",
    ),
    Entry(
        check="data.control_characters",
        title="Characters that nobody types",
        meaning="The text holds control characters, marks that turn its direction, or a byte order mark "
        "in the middle.",
        why="They cost tokens, come from terminals and faulty conversions, and can hide text from a reader.",
        confirm="pgs inspect --index LINE spells them out.",
        fix="Remove them, and set data.dataset to the mended file.",
        source="Trojan Source, arXiv 2111.00169, on marks of direction.",
    ),
    Entry(
        check="data.far_lengths",
        title="Lengths far from the rest",
        meaning="A few samples are many times longer or shorter than the others.",
        why="Long ones set the memory of the run and pad every batch they are in; very short ones are"
        " often broken.",
        confirm=_INSPECT,
        fix="Look at them; data.max_seq_length cuts the long ones.",
        source="Robust deviations of the logarithm of lengths, with limits in "
        "preflight/validate_findings.py.",
    ),
    Entry(
        check="data.far_scripts",
        title="A script that few samples are written in",
        meaning="Nearly all samples are written in one script, and a few in another.",
        why="They may be wanted. Often they are translations, scraps of another file, or wrongly "
        "decoded text.",
        confirm=_INSPECT,
        fix="Look at them; delete them if they are not wanted, and set data.dataset to the mended file.",
        source="Scripts by Unicode blocks; languages that share a script are not told apart.",
    ),
    Entry(
        check="data.padding",
        title="Much of a batch is padding",
        meaning="Rows of a batch are padded to the longest, and a large share of positions is nothing but"
        " that.",
        why="Padding is computed like any other token and trains nothing.",
        confirm="The facts of pgs validate: batches.padding_share.",
        fix="Set data.packing to true, or train.per_device_batch_size to 1.",
        source="Krell et al., Efficient Sequence Packing without Cross-contamination, arXiv 2107.02027.",
    ),
    Entry(
        check="data.packing_leak",
        title="Packed documents see each other",
        meaning="Positions of packed documents do not begin at 0, or changing one document moved the "
        "outputs of its neighbour.",
        why="Each document is trained with another one as context that has nothing to do with it; the"
        " loss differs from that of the same rows unpacked.",
        confirm="Train a few steps with data.packing false and compare train/loss.",
        fix="Set data.packing to false, or model.attn_implementation to sdpa or flash_attention_2.",
        source="Krell et al., arXiv 2107.02027.",
    ),
    Entry(
        check="data.packing_unproven",
        title="Whether packed documents stay apart is not known",
        meaning="A small model of the same make could not be built or run here, so nothing could be shown.",
        why="Training tries it on the model itself before its first step, and refuses packing where "
        "documents see each other.",
        confirm="Start the run: it says so before the first step.",
        fix="Nothing needs to change; set data.packing to false to be sure.",
        source="docs/data.md, packing.",
    ),
)
