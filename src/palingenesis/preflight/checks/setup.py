"""The tokenizer against the model: ids, positions, the token that ends generation, and tied weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.findings import Finding
from palingenesis.preflight.weights import opened, weight_files
from palingenesis.preflight.words import counted
from palingenesis.sft.builtin import is_builtin
from palingenesis.sft.hub import hub_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from palingenesis.sft.config import TrainConfig

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
#: What is done about tokens that the model has no row for.
ENLARGE = (
    "set model.name_or_path to the model that the tokenizer belongs to, or enlarge the embedding with "
    "resize_token_embeddings and save the model anew"
)
#: Rows of two tables that are compared at a time.
_ROWS = 4096


@dataclass(frozen=True)
class ModelFacts:
    """What a model's configuration says that data must agree with; ``None`` for what it does not say.

    ``stops`` are the tokens at which generation ends.
    """

    positions: int | None = None
    vocabulary: int | None = None
    stops: tuple[int, ...] | None = None
    tied: bool = False


def read_model_facts(config: TrainConfig) -> ModelFacts:
    """The facts of the model that is configured, as far as they can be had without its weights."""
    name = config.model.name_or_path
    if is_builtin(name):
        return ModelFacts()
    import transformers

    from palingenesis.sft.model import located

    asked = hub_options(name)
    trusted = {"trust_remote_code": config.model.trust_remote_code, **asked}
    try:
        where = located(name, "config.json")
        described = transformers.AutoConfig.from_pretrained(where, **trusted)
    except Exception:  # noqa: BLE001 - a folder with a tokenizer alone is enough for all other checks
        return ModelFacts()
    text: Any = described.get_text_config()
    stops = _listed(getattr(text, "eos_token_id", None) or getattr(described, "eos_token_id", None))
    try:
        own: Any = transformers.GenerationConfig.from_pretrained(where, **asked)
        stops = _listed(own.eos_token_id) or stops
    except Exception:  # noqa: BLE001 - most models come without one, and then the configuration's holds
        own = None
    return ModelFacts(
        positions=getattr(text, "max_position_embeddings", None),
        vocabulary=getattr(text, "vocab_size", None),
        stops=stops,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
    )


def check_setup(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, facts: ModelFacts, end_of_turn: str | None
) -> list[Finding]:
    """What does not fit together, whatever the data."""
    found = [*_check_vocabulary(tokenizer, facts), *_check_tied(config, facts)]
    if end_of_turn is not None:
        found += _check_stop(tokenizer, facts, end_of_turn)
    return found


def _check_vocabulary(tokenizer: Any, facts: ModelFacts) -> list[Finding]:
    if facts.vocabulary is None:
        return []
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    lacking = sorted((index, token) for token, index in vocabulary.items() if index >= facts.vocabulary)
    if not lacking:
        return []
    index, token = lacking[0]
    return [
        Finding(
            "tokenizer.larger_than_embedding",
            "warning",
            f"the tokenizer has {counted(len(lacking), 'token')} that the model has no row for, such as "
            f"{token!r} (number {index}; the embedding has {facts.vocabulary} rows)",
            {"tokens": [token for _, token in lacking[:20]], "vocabulary": facts.vocabulary},
            ENLARGE,
        )
    ]


def _check_stop(tokenizer: Any, facts: ModelFacts, end_of_turn: str) -> list[Finding]:
    stops = facts.stops or _listed(tokenizer.eos_token_id)
    ends = tokenizer(end_of_turn, add_special_tokens=False)["input_ids"]
    if not stops or set(stops) & set(ends):
        return []
    named = " and ".join(repr(token) for token in tokenizer.convert_ids_to_tokens(list(stops)))
    return [
        Finding(
            "tokenizer.end_of_turn_is_no_stop",
            "warning",
            f"answers are trained to end with {end_of_turn!r}, and generation stops at {named} alone",
            {"end_of_turn": ends, "stops": list(stops)},
            f"add {ends[0]} to eos_token_id in the model's generation_config.json, or set "
            f"model.chat_template to a template that ends answers with {named}",
        )
    ]


def _check_tied(config: TrainConfig, facts: ModelFacts) -> list[Finding]:
    """Tied weights that were saved as two tables must be one and the same."""
    if not facts.tied:
        return []
    tables = _tables(config.model.name_or_path)
    embedding = next((table for name, table in tables.items() if name.endswith(_EMBEDDINGS)), None)
    head = next((table for name, table in tables.items() if name.endswith(_HEADS)), None)
    if embedding is None or head is None or not (apart := _rows_apart(embedding, head)):
        return []
    return [
        Finding(
            "tokenizer.tied_weights_differ",
            "critical",
            f"the model ties its embedding and its head, and the two that are saved differ in "
            f"{counted(apart, 'row')}: one of them is lost when it is loaded",
            {"rows": apart},
            "set tie_word_embeddings to false in config.json if the head was trained by itself, or "
            "set model.name_or_path to a checkpoint that was saved with both as one",
        )
    ]


def _tables(name: str) -> dict[str, tuple[Path, str]]:
    """The file of each weight of a model that could be an embedding or a head."""
    found: dict[str, tuple[Path, str]] = {}
    for path in weight_files(name):
        with opened(path) as file:
            found |= {name: (path, name) for name in file.keys() if name.endswith((*_EMBEDDINGS, *_HEADS))}  # noqa: SIM118 - no mapping
    return found


def _rows_apart(one: tuple[Path, str], other: tuple[Path, str]) -> int:
    """In how many rows two saved tables differ, read a part at a time."""
    with opened(one[0]) as first, opened(other[0]) as second:
        left, right = first.get_slice(one[1]), second.get_slice(other[1])
        rows = left.get_shape()[0]
        if left.get_shape() != right.get_shape():
            return int(max(rows, right.get_shape()[0]))
        apart = 0
        for start in range(0, rows, _ROWS):
            differing = left[start : start + _ROWS] != right[start : start + _ROWS]
            apart += int(differing.any(-1).sum())
        return apart


def _listed(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
