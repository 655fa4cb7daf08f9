"""The first loss against that of a model that knows nothing: the logarithm of its vocabulary."""

from __future__ import annotations

import math
from typing import NamedTuple

#: Rows of the embeddings of models that are in wide use, with one family that has each.
VOCABULARIES = {
    30_522: "BERT",
    32_000: "Llama 2, Mistral 7B",
    32_064: "Phi-3",
    32_768: "Mistral 7B v0.3",
    49_152: "SmolLM2",
    50_257: "GPT-2",
    50_304: "GPT-2, padded",
    50_432: "GPT-NeoX",
    64_000: "Yi",
    65_024: "Falcon",
    100_352: "OLMo 2",
    102_400: "DeepSeek",
    128_256: "Llama 3",
    129_280: "DeepSeek-V3",
    131_072: "Mistral Nemo",
    151_936: "Qwen2.5, Qwen3",
    200_064: "Phi-4-mini",
    248_320: "Qwen3.5",
    256_000: "Gemma, Command R",
    262_144: "Gemma 3",
}


class Chance(NamedTuple):
    """A first loss that is that of a guess among all tokens."""

    loss: float
    vocabulary: int
    """The size whose logarithm is nearest."""
    family: str


def at_chance(first: float, within: float) -> Chance | None:
    """Whether a first loss is, within a share of it, the logarithm of a vocabulary in wide use."""
    if not first > 0:
        return None
    size = min(VOCABULARIES, key=lambda one: abs(math.log(one) - first))
    near = abs(math.log(size) - first) <= within * math.log(size)
    return Chance(first, size, VOCABULARIES[size]) if near else None
