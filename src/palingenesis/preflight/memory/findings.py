"""From an estimate to what a person is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from palingenesis.events import Severity
from palingenesis.findings import Finding
from palingenesis.preflight.memory.linear_attention import linear_layers

if TYPE_CHECKING:
    from palingenesis.preflight.memory.changes import Tried
    from palingenesis.preflight.memory.estimate import Fit
    from palingenesis.preflight.memory.limits import Limit

GB, MB = 10**9, 10**6
_KERNELS = "flash-linear-attention and causal-conv1d"
_INSTALL = "pip install flash-linear-attention causal-conv1d, on the machine that trains"


def findings_of(
    fit: Fit, tried: Sequence[Tried] = (), limits: Sequence[Limit] = (), without: Fit | None = None
) -> tuple[Finding, ...]:
    """What to say of a step on a card; without a card, nothing about fitting.

    Args:
        fit: the step on the card.
        tried: changes that were estimated.
        limits: how far options can go.
        without: the step without the kernels of linear attention, if that was estimated.
    """
    found = [_fitting(fit, tried)] if fit.gpu_bytes is not None else []
    found += _linear_attention(fit, without)
    found += _whole_gradients(fit)
    found += _larger(fit, limits)
    return tuple(found)


def _fitting(fit: Fit, tried: Sequence[Tried]) -> Finding:
    estimate, room, card = fit.estimate, fit.headroom, fit.gpu_bytes
    assert room is not None and card is not None
    use = estimate.use
    evidence: dict[str, Any] = {
        "peak_gb": _gb(use.peak),
        "total_gb": _gb(fit.total),
        "gpu_gb": _gb(card),
        "headroom_gb": _gb(room),
        "peak_in": use.phase.name.lower(),
    }
    takes = f"one step takes {in_words(use.peak)}, and {in_words(fit.total)} with allocator and context"
    if not fit.fits:
        missing = (
            f"{in_words(-room)} more than the card's {in_words(card)}"
            if room < 0
            else f"the card's {in_words(card)} would suffice, and in pieces they do not"
        )
        evidence["tried"] = {one.change.words: _gb(one.fit.total) for one in tried}
        return Finding(
            "memory.does_not_fit",
            "critical",
            f"{takes}: {missing}",
            evidence,
            _way_out(fit, tried),
        )
    if fit.tight:
        return Finding(
            "memory.tight",
            "warning",
            f"{takes}: {in_words(room)} ({100 * room / card:.1f}%) of the card's {in_words(card)} are left",
            evidence,
            _more_room(fit),
        )
    return Finding(
        "memory.fits",
        "info",
        f"{takes}: {in_words(room)} of the card's {in_words(card)} are left ({100 * room / card:.0f}%)",
        evidence,
        "",
    )


def _way_out(fit: Fit, tried: Sequence[Tried]) -> str:
    fitting = [one for one in tried if one.fits]
    if fitting:
        best = fitting[0]
        return f"{best.change.words} ({in_words(best.fit.total)}; cost: {best.change.cost})"
    if not tried:
        return "take a smaller data.max_seq_length, train.per_device_batch_size or model, or a larger card"
    least = min(tried, key=lambda one: one.fit.total)
    return (
        f"nothing tried fits; {least.change.words} comes closest with {in_words(least.fit.total)}: take a "
        "shorter data.max_seq_length, a smaller model or a larger card as well"
    )


def _more_room(fit: Fit) -> str:
    config = fit.estimate.config
    if config.train.per_device_batch_size > 1:
        return "lower train.per_device_batch_size, and raise train.gradient_accumulation_steps by as much"
    if not config.train.gradient_checkpointing:
        return "set train.gradient_checkpointing to true"
    return (
        "lower data.max_seq_length, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the "
        "environment, which saves most of what the allocator adds"
    )


def _whole_gradients(fit: Fit) -> list[Finding]:
    config = fit.estimate.config
    if config.parallel.strategy != "fsdp2" or config.train.gradient_accumulation_steps == 1:
        return []
    whole = fit.estimate.sizes.trained
    return [
        Finding(
            "memory.whole_gradients",
            "info",
            f"with train.gradient_accumulation_steps {config.train.gradient_accumulation_steps} every rank "
            f"holds all gradients ({in_words(whole)}) until the last micro-batch of a step, also under fsdp2",
            {"gradients_gb": _gb(whole), "world_size": fit.estimate.world_size},
            "",
        )
    ]


def _linear_attention(fit: Fit, without: Fit | None) -> list[Finding]:
    """Which kernels are counted on, and what the step takes without them."""
    layers = linear_layers(fit.estimate.described)
    if not layers:
        return []
    said = f"{layers} layers of linear attention are counted as the kernels of {_KERNELS} compute them"
    evidence: dict[str, Any] = {"layers": layers}
    severity: Severity = "info"
    if without is not None:
        peaks = fit.estimate.use.peak, without.estimate.use.peak
        more = f"takes {in_words(peaks[1])}" if in_words(peaks[1]) != in_words(peaks[0]) else "takes as much"
        said += f"; without these packages a step {more}, and longer"
        evidence |= {"with_gb": _gb(peaks[0]), "without_gb": _gb(peaks[1])}
        if fit.fits and not without.fits:
            said += f": {in_words(without.total)} in all do not fit"
            severity = "warning"
    elif fit.estimate.config.data.packing:
        said += "; without these packages packed rows cannot be trained"
    return [Finding("memory.linear_attention", severity, said, evidence, _INSTALL)]


def _larger(fit: Fit, limits: Sequence[Limit]) -> list[Finding]:
    """A batch that could be larger is worth a word where the step is accumulated from several."""
    config = fit.estimate.config
    rows, accumulated = config.train.per_device_batch_size, config.train.gradient_accumulation_steps
    for limit in limits:
        if limit.option != "train.per_device_batch_size" or not fit.fits or not limit.largest:
            continue
        fitting = [
            factor
            for factor in range(2, accumulated + 1)
            if accumulated % factor == 0 and rows * factor <= limit.largest
        ]
        if fitting:
            factor = fitting[-1]
            return [
                Finding(
                    "memory.room_for_batch",
                    "info",
                    f"{rows * factor} rows at once would fit, in {accumulated // factor} micro-batches in "
                    f"place of {accumulated}: the same step, with fewer and larger kernels",
                    {"rows": rows * factor, "accumulation": accumulated // factor, "largest": limit.largest},
                    f"--train.per_device_batch_size {rows * factor} "
                    f"--train.gradient_accumulation_steps {accumulated // factor}",
                )
            ]
    return []


def in_words(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / GB:.2f} GB" if abs(size) >= GB else f"{size / MB:.1f} MB"


def _gb(size: float) -> float:
    return round(size / GB, 4)
