"""Several documents in one row, and the proof that none of them sees another.

TRL packs, best fit first, and its collator makes from the lengths what keeps documents apart: positions that
begin at 0 in each, no attention mask, and the boundaries for kernels that want them. Whether a model's
attention heeds them is not taken on trust: ``require_isolation`` changes one document and looks at the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError
from palingenesis.sft.forward_only import forward_only

if TYPE_CHECKING:
    import torch
    from datasets import Dataset  # type: ignore[import-untyped]

LENGTHS = "seq_lengths"
#: How far a document's outputs may move when only its neighbour changes, as a share of the neighbour's own
#: move. What is masked has weight 0 and moves nothing; the rest is for kernels that regroup sums.
TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
_TOLERANCE_IN_HALF_PRECISION = 2e-2
_DOCUMENT = 12


def pack(dataset: Dataset, max_length: int) -> Dataset:
    """``dataset`` with whole samples put together in rows of at most ``max_length`` tokens.

    The order of the samples decides which come together, and the same order gives the same rows.
    """
    import datasets
    from trl.data_utils import pack_dataset

    columns = dataset.select_columns(["input_ids", "labels"])
    in_memory = {"keep_in_memory": True, "load_from_cache_file": False}
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # one would be drawn for every epoch
    try:
        packed: Dataset = pack_dataset(columns, max_length, "bfd", map_kwargs=in_memory)
    finally:
        if not silent:
            datasets.enable_progress_bars()
    return packed


def collator(pad_token_id: int, *, packed: bool, pad_to_multiple_of: int | None = None) -> Any:
    """TRL's collator for samples with labels: padded, or laid end to end when they are packed."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(
        pad_token_id=pad_token_id, padding_free=packed, pad_to_multiple_of=pad_to_multiple_of
    )


@dataclass(frozen=True)
class Isolation:
    """How far changing one of two packed documents moved its outputs (``own``) and the other's (``leak``)."""

    own: float
    leak: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the second document is as good as alone. A test that moved nothing shows nothing."""
        return self.own > 0 and self.leak <= self.tolerance * self.own


def measure_isolation(model: torch.nn.Module, batch_of: Any = None, *, use_cache: bool = False) -> Isolation:
    """Pack two documents, change every token of the first, and measure how far the second's outputs move.

    The model comes back as it was: mode, gradients and random numbers. ``batch_of`` makes the batch from
    samples; by default it is the collator of packed training. Training must call the model with
    ``use_cache=False`` too, as TRL does: with a cache transformers does not look for packed documents.
    """
    import torch

    batch_of = batch_of or collator(0, packed=True)
    size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    steps = torch.arange(_DOCUMENT)
    first, other, second = ((steps * 7 + start) % size for start in (1, size // 2 + 2, 3))
    batches = [batch_of([_sample(changed, second)]) for changed in (first, other)]
    device = next(model.parameters()).device
    with forward_only(model):
        one, two = (_outputs(model, batch, use_cache, device) for batch in batches)
    moved = (one.double() - two.double()).abs().amax(-1)
    dtype = str(one.dtype).removeprefix("torch.")
    return Isolation(
        own=float(moved[:_DOCUMENT].max()),
        leak=float(moved[_DOCUMENT:].max()),
        tolerance=TOLERANCE.get(dtype, _TOLERANCE_IN_HALF_PRECISION),
    )


def require_isolation(model: torch.nn.Module) -> Isolation:
    """See that packed documents stay apart in ``model`` with the attention it has.

    Raises:
        ConfigError: they do not, or this model cannot be asked.
    """
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own"
    named = f"data.packing with {type(model).__name__} and attention {attention!r}"
    try:
        found = measure_isolation(model)
    except Exception as error:  # noqa: BLE001 - whatever a model raises, it means the proof cannot be given
        told = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{named} could not be tried out ({told}); set data.packing to false, or "
            "model.attn_implementation to sdpa"
        ) from None
    if not found.holds:
        raise ConfigError(
            f"{named} lets packed documents see each other: changing one moved the other's outputs by "
            f"{found.leak:.2g} (its own by {found.own:.2g}); set data.packing to false, or "
            "model.attn_implementation to sdpa"
        )
    return found


def _sample(*documents: torch.Tensor) -> dict[str, list[int]]:
    ids = [token for document in documents for token in document.tolist()]
    return {"input_ids": ids, "labels": ids, LENGTHS: [len(document) for document in documents]}


def _outputs(
    model: torch.nn.Module, batch: Mapping[str, Any], use_cache: bool, device: torch.device
) -> torch.Tensor:
    inputs = {
        key: value.to(device) if hasattr(value, "to") else value
        for key, value in batch.items()
        if key != "labels"
    }
    logits: torch.Tensor = model(**inputs, use_cache=use_cache).logits
    return logits[0]
