"""What several ranks change: shares of FSDP2, and what is there beside them for communication. By formula.

DDP keeps everything on every rank, and a flat copy of all gradients in its buckets (accelerate leaves
``gradient_as_bucket_view`` off).

FSDP2, as transformers applies it (``fully_shard`` on every block, on the embedding, and on final norm and
head together; the last are not split again before the backward pass is done):

    parameters, gradients, optimizer states, and what the optimizer's step makes: 1/n, each tensor's first
        dimension rounded up to a multiple of n
    gradients of all micro-batches but the last: whole, because the trainer reduces them only with the last
    beside it, from forward to backward: the head and what is not in a block whole, two blocks whole (the one
        that computes and the one that is fetched), and in the backward pass one block's gradients once more,
        for the reduction
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from palingenesis.preflight.memory.categories import SPLIT, Category, Phase


@dataclass(frozen=True)
class Sizes:
    """A model's parameters, in bytes.

    Attributes:
        tensors: first dimension, bytes, and whether trained, of every parameter.
        block: the largest block.
        kept: what is in no block and whole while the step lasts: head, final norm.
    """

    tensors: tuple[tuple[int, int, bool], ...]
    block: int
    kept: int

    @property
    def all(self) -> int:
        return sum(size for _, size, _ in self.tensors)

    @property
    def trained(self) -> int:
        return sum(size for _, size, trained in self.tensors if trained)

    def share(self, ranks: int) -> float:
        """What one of ``ranks`` holds, of the whole."""
        held = sum(size * -(-rows // ranks) / max(rows, 1) for rows, size, _ in self.tensors)
        return held / max(self.all, 1)


def sizes_of(model: nn.Module) -> Sizes:
    """The sizes of a model's parameters, tied ones once."""
    seen = {id(one): one for one in model.parameters()}
    blocks = _blocks(model)
    in_blocks = {id(one) for block in blocks for one in block.parameters()}
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    elsewhere = in_blocks | ({id(embedding.weight)} if head.weight is not embedding.weight else set())
    return Sizes(
        tensors=tuple(
            (one.shape[0] if one.dim() else 1, one.numel() * one.element_size(), one.requires_grad)
            for one in seen.values()
        ),
        block=max((_bytes(block.parameters()) for block in blocks), default=0),
        kept=_bytes(one for key, one in seen.items() if key not in elsewhere),
    )


def _bytes(parameters: Any) -> int:
    return sum(one.numel() * one.element_size() for one in parameters)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest list of modules: the transformer's blocks."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def weights(sizes: Sizes, strategy: str, ranks: int) -> dict[Category, float]:
    """The share of each category that a rank holds."""
    if strategy != "fsdp2":
        return {}
    share = sizes.share(ranks)
    return dict.fromkeys(SPLIT, share)


def beside(sizes: Sizes, strategy: str, ranks: int) -> Mapping[Phase, int]:
    """Bytes for communication, by part of the step."""
    if ranks == 1:
        return {}
    if strategy != "fsdp2":
        return dict.fromkeys(Phase, sizes.trained)
    whole = sizes.kept + 2 * sizes.block
    return {Phase.FORWARD: whole, Phase.LOSS: whole, Phase.BACKWARD: whole + sizes.block}
