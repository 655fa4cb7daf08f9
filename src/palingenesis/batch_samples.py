"""The samples of one micro-batch, from its tensors on the host and from what the data set says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from palingenesis.config import MonitorConfig
from palingenesis.record.spikes import MicroBatch, Sample
from palingenesis.signals.entropy import IGNORED

# Columns that collators pass on, by what they are usually called.
_INDEX = ("index", "indices", "idx", "sample_index", "example_index", "sample_id", "example_id")
_SOURCE = ("source", "sources", "dataset", "dataset_name", "task", "domain")
_NOT_TOKENS = frozenset(
    {"labels", "attention_mask", "position_ids", "token_type_ids", "shift_labels", "completion_mask"}
)
_ELSEWHERE = (
    "the rows that the order of the data set gives are not those of the batch, so places are left out "
    "(a sampler or a collator of its own)"
)
_OF_TEXT_AT_THE_END = 3  # a third of the text is the sample's end


@dataclass(frozen=True)
class Place:
    """A sample in the data set.

    Attributes:
        index: from 0.
        source, row: where it comes from, as :class:`~palingenesis.record.spikes.Sample` has it.
        ids, labels: its tokens as the data set has them.
        text: where it has text instead.
        values: other short columns.
    """

    index: int
    source: str | None = None
    row: int | None = None
    ids: Sequence[int] | None = None
    labels: Sequence[int] | None = None
    text: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Tokens:
    ids: list[int]
    labels: list[int] | None


def micro_batch(
    tensors: Mapping[str, torch.Tensor],
    others: Mapping[str, Sequence[Any]],
    places: Sequence[Place] | None,
    config: MonitorConfig,
    tokenizer: Any,
) -> tuple[MicroBatch, str | None]:
    """The samples, and what is doubtful about them.

    Args:
        tensors: on the host.
        others: lists of one entry a sample.
        places: of the samples, in their order.
        config: how much is told.
        tokenizer: makes text of tokens; ``None`` for no text.
    """
    ids = _token_ids(tensors)
    tokens = [] if ids is None else _documents(ids, tensors)
    doubt = None
    if places is not None and not _same(places, tokens, ids is not None, config.spike_tokens):
        places, doubt = None, _ELSEWHERE
    count = len(tokens) or len(places or ()) or _rows(tensors, others)
    told = min(count, config.spike_samples)
    samples = [
        _sample(
            tokens[i] if tokens else _of_place(places, i),
            places[i] if places else None,
            {} if len(tokens) != _rows(tensors, others) and tokens else _values(tensors, others, i),
            config,
            tokenizer,
        )
        for i in range(told)
    ]
    return MicroBatch(samples=tuple(samples), left_out=count - told), doubt


# -- tokens ------------------------------------------------------------------------------------------------


def _token_ids(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The tensor of token ids: the one that is called so, or the first table of whole numbers."""
    ids = tensors.get("input_ids")
    if ids is not None:
        return ids if ids.dim() == 2 else None
    tables = (tensor for name, tensor in tensors.items() if name not in _NOT_TOKENS)
    return next((table for table in tables if table.dim() == 2 and _is_whole(table)), None)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16)


def _documents(ids: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> list[_Tokens]:
    """The tokens of each sample without padding; packed rows are several samples."""
    mask, labels = _like(ids, tensors.get("attention_mask")), _like(ids, tensors.get("labels"))
    positions = _like(ids, tensors.get("position_ids"))
    found = []
    for i, row in enumerate(ids):
        real = torch.ones_like(row, dtype=torch.bool) if mask is None else mask[i] > 0
        tokens, targets = row[real], None if labels is None else labels[i][real]
        starts = [0] if positions is None else _starts(positions[i][real])
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            part = None if targets is None else targets[start:end].tolist()
            found.append(_Tokens(tokens[start:end].tolist(), part))
    return found


def _like(ids: torch.Tensor, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is not None and tensor.shape == ids.shape else None


def _starts(positions: torch.Tensor) -> list[int]:
    """Where documents begin: where positions do not go on."""
    new = positions[1:] != positions[:-1] + 1
    return [0, *(int(at) + 1 for at in new.nonzero().flatten())]


def _of_place(places: Sequence[Place] | None, i: int) -> _Tokens | None:
    if not places or places[i].ids is None:
        return None
    labels = places[i].labels
    return _Tokens(list(places[i].ids or ()), None if labels is None else list(labels))


def _same(places: Sequence[Place], tokens: Sequence[_Tokens], readable: bool, compared: int) -> bool:
    """Whether the places can be those of the batch; what cannot be compared is taken as it is."""
    if not readable:
        return True
    if len(places) != len(tokens):
        return False
    return all(
        place.ids is None or list(place.ids[:compared]) == one.ids[: min(compared, len(place.ids))]
        for place, one in zip(places, tokens, strict=True)
    )


# -- samples -----------------------------------------------------------------------------------------------


def _rows(tensors: Mapping[str, torch.Tensor], others: Mapping[str, Sequence[Any]]) -> int:
    """How many samples a batch has that is no table of tokens."""
    sizes = [len(tensor) for tensor in tensors.values() if tensor.dim()]
    return next(iter([*sizes, *map(len, others.values())]), 0)


def _sample(
    tokens: _Tokens | None,
    place: Place | None,
    values: dict[str, Any],
    config: MonitorConfig,
    tokenizer: Any,
) -> Sample:
    index, source = _taken(values, _INDEX), _taken(values, _SOURCE)
    index = index if isinstance(index, int) else None
    source = None if source is None else str(source)
    if place is not None:
        index, source = place.index, place.source or source
        values = {**place.values, **values}
    ids = [] if tokens is None else tokens.ids
    text = _text_of(ids, tokenizer, config.spike_text) if ids else None
    if text is None and place is not None and place.text is not None:
        text = _shortened(place.text, config.spike_text)
    return Sample(
        index=place.index if place is not None else index if isinstance(index, int) else None,
        source=place.source
        if place is not None and place.source
        else None
        if source is None
        else str(source),
        row=None if place is None else place.row,
        tokens=None if tokens is None else len(ids),
        loss_tokens=None if tokens is None or tokens.labels is None else _bearing(tokens.labels),
        first_tokens=tuple(ids[: config.spike_tokens]),
        text=text,
        values=values,
    )


def _bearing(labels: Sequence[int]) -> int:
    """Labels that are a target: the first one of a sample is nobody's."""
    return sum(label != IGNORED for label in labels[1:])


def _taken(values: dict[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in values:
            return values.pop(name)
    return None


def _values(
    tensors: Mapping[str, torch.Tensor], others: Mapping[str, Sequence[Any]], i: int
) -> dict[str, Any]:
    """What else tells one sample from another: single values, and the range of inputs that are no tokens."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not tensor.dim() or i >= len(tensor):
            continue
        if tensor[i].numel() == 1:
            found[name] = tensor[i].item()
        elif tensor.is_floating_point() and tensor[i].numel():
            found[name] = _range(tensor[i].float())
    return found | {name: entries[i] for name, entries in others.items() if i < len(entries)}


def _range(values: torch.Tensor) -> dict[str, float | int]:
    finite = values[torch.isfinite(values)]
    told: dict[str, float | int] = {"nonfinite": values.numel() - finite.numel()}
    if finite.numel():
        told |= {"least": float(finite.min()), "most": float(finite.max()), "mean": float(finite.mean())}
    return told


def _text_of(ids: Sequence[int], tokenizer: Any, most: int) -> str | None:
    """Beginning and end of the tokens as text, of at most so many characters."""
    if tokenizer is None or not most:
        return None
    if len(ids) <= most:
        return _shortened(tokenizer.decode(ids), most)
    # A token is a character at least, as a rule: more of them need not be looked at.
    end = most // _OF_TEXT_AT_THE_END
    return f"{tokenizer.decode(ids[:most])[: most - end]} … {tokenizer.decode(ids[-most:])[-end:]}"


def _shortened(text: str, most: int) -> str | None:
    if not most:
        return None
    end = most // _OF_TEXT_AT_THE_END
    return text if len(text) <= most else f"{text[: most - end]} … {text[-end:]}"
