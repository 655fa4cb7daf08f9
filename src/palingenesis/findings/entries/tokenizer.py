"""What a tokenizer can have wrong with it, against its model or its template."""

from __future__ import annotations

from palingenesis.findings.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        check="tokenizer.double_bos",
        title="Two beginning-of-text tokens",
        meaning="Conversations begin with the beginning-of-text token twice: the template writes it, and "
        "again itself, or the tokenizer or collator puts it before.",
        why="The model was trained with one. Two move every later position and are met in use only if"
        " the same mistake is made there.",
        confirm="tokenizer.apply_chat_template(messages) and the first two ids.",
        fix="Set model.chat_template to a copy of the template with one bos_token, or let the "
        "tokenizer add none (add_special_tokens=False).",
        source="https://huggingface.co/docs/transformers/chat_templating",
    ),
    Entry(
        check="tokenizer.missing_bos",
        title="No beginning-of-text token",
        meaning="The tokenizer puts a beginning-of-text token before any text, and the conversations of "
        "this template begin without.",
        why="The model has seen every text begin with it. Without it the first tokens are out of "
        "distribution, and servers that add it give the model something else than it was trained "
        "on.",
        confirm="tokenizer('a').input_ids begins with bos_token_id, and "
        "tokenizer.apply_chat_template(messages) does not.",
        fix="Set model.chat_template to a template that begins with {{ bos_token }}, unless the model"
        " was pre-trained without.",
        source="https://huggingface.co/docs/transformers/chat_templating",
    ),
    Entry(
        check="tokenizer.end_of_turn_is_no_stop",
        title="Generation does not stop where answers end",
        meaning="Answers are trained to end with a token that is not among those at which generation "
        "stops, by generation_config.json or config.json.",
        why="The model ends its answer correctly, and the server goes on.",
        confirm="Compare eos_token_id in generation_config.json with the last token of an answer in pgs "
        "inspect.",
        fix="Add the token to eos_token_id in generation_config.json, or set model.chat_template to a"
        " template that ends answers with the stop token.",
        source="https://huggingface.co/docs/transformers/main_classes/text_generation",
    ),
    Entry(
        check="tokenizer.ids_outside_embedding",
        title="Token ids that the embedding has no row for",
        meaning="The data has a token whose number is beyond the rows of the embedding.",
        why="On a CPU the run ends with an index error; on CUDA with a device-side assertion that "
        "names no cause.",
        confirm="max(input_ids) against vocab_size in config.json.",
        fix="Set model.name_or_path to the model that the tokenizer belongs to, or enlarge the "
        "embedding with resize_token_embeddings and save the model anew.",
        source="https://huggingface.co/docs/transformers/main_classes/model",
    ),
    Entry(
        check="tokenizer.larger_than_embedding",
        title="The tokenizer has more tokens than the model",
        meaning="Tokens of the vocabulary have numbers beyond the rows of the embedding.",
        why="Training refuses such a model if its template or its special tokens use them; a row that"
        " holds one cannot be computed.",
        confirm="len(tokenizer) against vocab_size in config.json.",
        fix="Set model.name_or_path to the model that the tokenizer belongs to, or enlarge the "
        "embedding with resize_token_embeddings and save the model anew.",
        source="https://huggingface.co/docs/transformers/main_classes/model",
    ),
    Entry(
        check="tokenizer.tied_weights_differ",
        title="Tied weights that are not the same",
        meaning="The configuration ties embedding and head, the checkpoint holds both, and they differ.",
        why="When it is loaded, one of them is put in the place of the other: outputs become garbage "
        "although every file is intact.",
        confirm="Load both tables with safetensors and compare them.",
        fix="Set tie_word_embeddings to false in config.json if the head was trained by itself, or "
        "set model.name_or_path to a checkpoint saved with both as one.",
        source="https://huggingface.co/docs/safetensors/torch_shared_tensors",
    ),
)
