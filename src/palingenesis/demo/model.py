"""The demonstration's model: a small Llama-style language model with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from palingenesis.demo.corpus import require

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

HIDDEN = 224
LAYERS = 4
HEADS = 4
EXPANSION = 3
CONTEXT = 64


def build_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    """The same weights for the same seed; torch's global generator is left as it was."""
    transformers = require("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=EXPANSION * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: LlamaForCausalLM = transformers.LlamaForCausalLM(config)
    return model
