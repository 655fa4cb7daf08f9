"""A model and data that need no download: the names that begin with ``demo:``.

    demo:tiny-chat         a small Llama with random weights, and a byte-level BPE tokenizer
    demo:chatterbot        conversations of chatterbot-corpus, to train on
    demo:chatterbot-eval   every tenth of them, which ``demo:chatterbot`` leaves out

All is made on the spot from the package that ``palingenesis[demo]`` brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from palingenesis.demo.corpus import Conversation, load_conversations, require
from palingenesis.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PREFIX = "demo:"
MODEL = "demo:tiny-chat"
TRAIN, HELD_OUT = "demo:chatterbot", "demo:chatterbot-eval"

_HELD_OUT_EVERY = 10
_POSITIONS = 8192
_START, _PAD = "<|start|>", "<|pad|>"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def is_builtin(name: str) -> bool:
    """Whether a model or data set of this name is made here."""
    return name.startswith(PREFIX)


def builtin_rows(name: str, split: str = "train") -> list[dict[str, Any]]:
    """The rows of a data set, ``{"messages": [...]}``.

    Raises:
        ConfigError: there is none of that name, or it has no such split.
        MissingExtraError: a package of the extra ``demo`` is missing.
    """
    _require_known("data.dataset", name, (TRAIN, HELD_OUT))
    if name == TRAIN and split != "train":
        raise ConfigError(
            f"data.dataset: {TRAIN!r} has only the split 'train', not {split!r}; the conversations that it "
            f"leaves out are {HELD_OUT!r}"
        )
    return [{"messages": _messages(turns)} for turns in _conversations(held_out=name == HELD_OUT)]


def build_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model, trained on the conversations of ``demo:chatterbot``.

    Raises:
        ConfigError: there is no model of that name.
        MissingExtraError: a package of the extra ``demo`` is missing.
    """
    _require_known("model.name_or_path", name, (MODEL,))
    transformers = require("transformers")
    from palingenesis.demo.tokens import END_OF_TURN, train_tokenizer

    tokenizer: PreTrainedTokenizerFast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(_conversations(held_out=False)),
        eos_token=END_OF_TURN,
        pad_token=_PAD,
        additional_special_tokens=[_START],
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build_model(
    name: str, tokenizer: PreTrainedTokenizerFast, *, seed: int, max_length: int | None
) -> LlamaForCausalLM:
    """A model for that tokenizer, with positions for ``max_length`` tokens (8192 if not given); in fp32.

    Raises:
        ConfigError: there is no model of that name.
        MissingExtraError: a package of the extra ``demo`` is missing.
    """
    _require_known("model.name_or_path", name, (MODEL,))
    require("transformers")
    from palingenesis.demo import model as demo

    model = demo.build_model(len(tokenizer), seed)
    # Positions are rotary: how many there are is a number in the configuration, and no weight's size.
    model.config.max_position_embeddings = max(max_length or _POSITIONS, demo.CONTEXT)
    for config in (model.config, model.generation_config):
        config.bos_token_id = None
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return model


@cache
def _all_conversations() -> tuple[tuple[str, ...], ...]:
    """Those that end with the answer to a question, each up to the first turn without text."""
    found = []
    for turns in load_conversations():
        spoken = next((at for at, turn in enumerate(turns) if not turn.strip()), len(turns))
        if whole := spoken // 2 * 2:
            found.append(tuple(turns[:whole]))
    return tuple(found)


def _conversations(*, held_out: bool) -> list[Conversation]:
    return [
        list(turns)
        for number, turns in enumerate(_all_conversations(), start=1)
        if (number % _HELD_OUT_EVERY == 0) is held_out
    ]


def _messages(turns: Sequence[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)]


def _require_known(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(
            f"{option}: there is no {name!r}; of names that begin with {PREFIX!r} there is "
            f"{' and '.join(map(repr, known))}"
        )
