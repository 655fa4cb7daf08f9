"""The tokenizer against the model, beyond what ``validate`` looks at: special tokens, vocabulary, the head.

What needs data (the token that ends answers, ids outside the embedding) and weights that were tied and saved
apart are checked in :mod:`palingenesis.preflight.checks.setup`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from palingenesis.findings import Finding
from palingenesis.preflight.weights import opened, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from palingenesis.sft.config import TrainConfig

#: Rows that an embedding may have beyond the tokenizer's tokens, as a share of them: families round up, and
#: keep room for tokens to come.
MOST_SPARE = 0.25
_SPARE_ROWS = 1024
_HEADS = ("lm_head.weight", "embed_out.weight")


def check_tokenizer(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, described: Any) -> list[Finding]:
    """What does not fit together, whatever the data.

    Args:
        config: says where the model is.
        tokenizer: that training would use.
        described: the model's own configuration.
    """
    text = described.get_text_config()
    return [
        *_special_tokens(tokenizer, described, text),
        *_spare_rows(tokenizer, text),
        *_head(config, text),
    ]


def _special_tokens(tokenizer: Any, described: Any, text: Any) -> Iterator[Finding]:
    """Tokens that the model's configuration gives a meaning, and the tokenizer knows as something else."""
    known = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    if not known:
        return
    odd: dict[str, Any] = {}
    # Where a tokenizer begins no text with a token, the configuration's is a leftover that nothing reads.
    names = ["eos_token_id", *(["bos_token_id"] if tokenizer.bos_token_id is not None else [])]
    for name in names:
        value = getattr(text, name, None)
        value = getattr(described, name, None) if value is None else value
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if token is not None and token not in known:
                odd[name] = {"id": token, "token": tokenizer.convert_ids_to_tokens(int(token))}
    if odd:
        told = " and ".join(f"{name} {one['id']} is {one['token']!r}" for name, one in odd.items())
        yield Finding(
            "config.special_tokens",
            "warning",
            f"in the tokenizer, the model's {told}, which is no special token there: one of the two belongs "
            "to another model",
            odd,
            "set model.name_or_path to a folder whose tokenizer was saved with its model",
        )


def _spare_rows(tokenizer: Any, text: Any) -> Iterator[Finding]:
    rows, tokens = getattr(text, "vocab_size", None), len(tokenizer)
    if rows is None or rows - tokens <= max(_SPARE_ROWS, MOST_SPARE * tokens):
        return
    yield Finding(
        "config.tokenizer_smaller",
        "warning",
        f"the model has {rows} tokens and the tokenizer {tokens}: it is probably that of another model",
        {"embedding_rows": rows, "tokens": tokens},
        "set model.name_or_path to a folder whose tokenizer was saved with its model",
    )


def _head(config: TrainConfig, text: Any) -> Iterator[Finding]:
    """A head of its own that is in none of the files."""
    files = weight_files(config.model.name_or_path)
    if not files or getattr(text, "tie_word_embeddings", False):
        return
    names: list[str] = []
    for path in files:
        with opened(path) as file:
            names += file.keys()
    if any(name.endswith(_HEADS) for name in names):
        return
    if not any(name.endswith(("embed_tokens.weight", "embed_in.weight")) for name in names):
        return  # a family that names its parts otherwise
    yield Finding(
        "config.head_missing",
        "critical",
        f"the config.json in {config.model.name_or_path!r} says that the LM head is not tied to the "
        "embedding, and no file has its weights",
        {"files": [path.name for path in files]},
        "set tie_word_embeddings to true in config.json if the model was trained so, or save it anew with "
        "its head",
    )
