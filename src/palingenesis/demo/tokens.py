"""From conversations to batches: a byte-level BPE tokenizer trained on them, and shuffled blocks of tokens.

Conversations are laid end to end, each turn closed by one end-of-turn token, and cut into blocks of equal
length. Blocks come in an order that depends on the seed alone, so two runs see the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from palingenesis.demo.corpus import Conversation, require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TURN = "<|end|>"
VOCABULARY = 1536


def train_tokenizer(conversations: list[Conversation]) -> Tokenizer:
    """A byte-level BPE tokenizer with at most ``VOCABULARY`` entries, trained on the turns."""
    tokenizers = require("tokenizers")
    tokenizer: Tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TURN],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((turn for turns in conversations for turn in turns), trainer)
    return tokenizer


def token_blocks(conversations: list[Conversation], tokenizer: Tokenizer, length: int) -> torch.Tensor:
    """All conversations as one ``[blocks, length]`` tensor of token ids; a short rest is left out."""
    text = [turn + END_OF_TURN for turns in conversations for turn in turns]
    ids = [token for encoding in tokenizer.encode_batch(text) for token in encoding.ids]
    whole = len(ids) // length * length
    return torch.tensor(ids[:whole]).view(-1, length)


def batches(blocks: torch.Tensor, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches for ever, every block once an epoch, shuffled by a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        for start in range(0, len(order) - size + 1, size):
            yield blocks[order[start : start + size]]
