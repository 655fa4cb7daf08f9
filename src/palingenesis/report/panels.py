"""Which signals share a chart, what the chart is called, and how it is read.

Each panel asks for what it knows and is left out where a run has none of it. What no panel claims is drawn
under the heading of other signals, so that every number of a record is on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.record.format import STEP_KEY
from palingenesis.report.panel import LOOKS, MOST_LINES, Bound, Line, Panel
from palingenesis.report.series import Signals
from palingenesis.runlogs.table import EMPTY, Column

#: Batch sizes within this share of each other are one size.
_STEADY = 0.02

Maker = Callable[[Signals, MonitorConfig], Panel | None]


def panels_of(signals: Signals, config: MonitorConfig) -> list[Panel]:
    """The panels for which a run has numbers, in the order of the page."""
    made = (make(signals, config) for make in _MAKERS)
    return [panel for panel in made if panel is not None and any(line.column.finite for line in panel.lines)]


def _panel(
    key: str,
    title: str,
    about: str,
    lines: Iterable[Line],
    *,
    claims: Iterable[str],
    bounds: tuple[Bound, ...] = (),
    from_zero: bool = False,
    linear: bool = False,
) -> Panel:
    present: list[Line] = []
    for line in lines:
        if line.column and not any(_same(line.column, other.column) for other in present):
            present.append(line)
    left = len(present) - MOST_LINES
    notes = (f"{left} more are in metrics.jsonl.",) if left > 0 else ()
    return Panel(
        key=key,
        title=title,
        about=about,
        lines=tuple(present[:MOST_LINES]),
        bounds=bounds,
        from_zero=from_zero,
        linear=linear or from_zero,
        notes=notes,
        claims=frozenset(claims),
    )


def _same(one: Column, other: Column) -> bool:
    """Two names of one number: one line says it all."""
    return np.array_equal(one.step, other.step) and np.array_equal(one.value, other.value, equal_nan=True)


# -- one function a panel -----------------------------------------------------------------------------------


def _loss(signals: Signals, config: MonitorConfig) -> Panel | None:
    plain = "train/ce_loss" not in signals
    name = "train/loss" if plain else "train/ce_loss"
    sources = {
        rest.removesuffix("/loss"): column
        for rest, column in signals.below("eval/").items()
        if rest.endswith("/loss")
    }
    lines = [
        Line("train" if plain else "train (cross-entropy)", signals[name], LOOKS[0], smoothed=True),
        Line("eval", signals["eval/loss"], LOOKS[1], dots=True),
        *(Line(f"eval, {source}", column, look, dots=True) for source, column, look in _looked(sources, 2)),
    ]
    return _panel(
        "loss-eval",
        "Loss: training against evaluation",
        "Evaluation that rises while training falls is overfitting. The strong line is the median of "
        "neighbouring steps.",
        lines,
        claims=[name, "eval/loss", *(f"eval/{source}/loss" for source in sources)],
    )


def _looked(columns: Mapping[str, Column], first: int = 0) -> Iterator[tuple[str, Column, str]]:
    """Labels and columns, each with a look; from ``first`` on, and over again where there are more."""
    for place, (label, column) in enumerate(columns.items(), start=first):
        yield label, column, LOOKS[place % len(LOOKS)]


def _objective(signals: Signals, config: MonitorConfig) -> Panel | None:
    if "train/ce_loss" not in signals:
        return None
    names = {"train/loss": "objective", "train/token_gate": "mean token gate"}
    lines = [
        Line(label, column, look, smoothed=True) for label, column, look in _looked(_labelled(signals, names))
    ]
    about = "What is minimised where that is not the cross-entropy: smaller by its gate, and not comparable."
    return _panel("objective", "Objective and gate", about, lines, claims=names)


def _named(
    key: str,
    title: str,
    about: str,
    names: dict[str, str],
    *,
    smoothed: bool = False,
    from_zero: bool = False,
    linear: bool = False,
    bounds: Callable[[MonitorConfig], tuple[Bound, ...]] = lambda config: (),
) -> Maker:
    """A panel of fixed names with their labels."""

    def make(signals: Signals, config: MonitorConfig) -> Panel | None:
        lines = [
            Line(label, signals[name], look, error=signals[f"{name}_se"], smoothed=smoothed)
            for (name, label), look in zip(names.items(), LOOKS, strict=False)
        ]
        claims = [*names, *(f"{name}_se" for name in names)]
        return _panel(
            key,
            title,
            about,
            lines,
            claims=claims,
            bounds=bounds(config),
            from_zero=from_zero,
            linear=linear,
        )

    return make


def _rate(signals: Signals, config: MonitorConfig) -> Panel | None:
    groups = signals.below("train/lr/")
    lines = [
        Line("learning rate", signals["train/lr"], LOOKS[0]),
        *(Line(group, column, look) for group, column, look in _looked(groups, 1)),
    ]
    about = "That of the step just taken; of several parameter groups the one with most parameters, and each."
    claims = ["train/lr", *(f"train/lr/{group}" for group in groups)]
    return _panel("lr", "Learning rate", about, lines, claims=claims, from_zero=True)


def _noise(signals: Signals, config: MonitorConfig) -> Panel | None:
    """The noise scale in sequences with the batch that was used; without its size, their ratio."""
    batch = batch_in_sequences(signals)
    known = bool(batch)
    size = float(np.median(batch.value)) if known else 1.0
    # Ratios of estimates are off by rounding; batches that differ truly get a line.
    steady = bool(known and np.allclose(batch.value, size, rtol=_STEADY))
    name = "health/gns" if known else "health/gns_ratio"
    unit = "noise scale, in sequences" if known else "noise scale over batch size"
    lines = [
        Line(unit, signals[name], "two", error=signals[f"{name}_se"], dots=True),
        Line("at least (lower bound)", signals[f"{name}_lower"], "two", bounds_only=True),
        Line("batch size that was used, in sequences", EMPTY if steady else batch, "one"),
    ]
    label = "batch size that was used, in sequences" if known else "the batch that was used"
    claims = [f"health/{name}{end}" for name in ("gns", "gns_ratio") for end in ("", "_se", "_lower")]
    return _panel(
        "noise",
        "Gradient noise scale against batch size",
        "The batch size at which noise and signal in the gradient are equal (McCandlish et al. 2018). With a "
        "batch far below it each step is mostly noise; one far above it is larger than the gradient needs.",
        lines,
        claims=[*claims, "health/gns_source"],
        bounds=(Bound(size, label, always=True),) if steady or not known else (),
    )


def batch_in_sequences(signals: Signals) -> Column:
    """The size of the batch, from the scale and its ratio to the batch, where rows have both."""
    parts = []
    for end in ("", "_lower"):
        scale, ratio = signals[f"health/gns{end}"], signals[f"health/gns_ratio{end}"]
        _, left, right = np.intersect1d(scale.row, ratio.row, return_indices=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            size = scale.value[left] / ratio.value[right]
        parts.append(Column(scale.row[left], scale.step[left], size).finite)
    row, step, value = (np.concatenate(both) for both in zip(*parts, strict=True))
    order = np.argsort(step, kind="stable")
    return Column(row[order], step[order], value[order])


def _norm(signals: Signals, config: MonitorConfig) -> Panel | None:
    raw, norm = signals["train/grad_norm_raw"], signals["train/grad_norm"]
    # Alone, it is whatever the trainer wrote: most write it as it was before clipping.
    label = "as the optimizer gets it" if raw else "gradient norm"
    lines = [
        Line("before clipping", raw, LOOKS[0], smoothed=True),
        Line(label, norm, LOOKS[1], smoothed=True),
    ]
    return _panel(
        "grad-norm",
        "Gradient norm",
        "Of the whole gradient. What grows steadily is on its way to diverge; where clipping cuts at every "
        "step, the learning rate is in truth another.",
        lines,
        claims=["train/grad_norm_raw", "train/grad_norm"],
    )


def _memory(signals: Signals, config: MonitorConfig) -> Panel | None:
    names = {
        "health/cuda_peak_gb": "peak on the device",
        "health/cuda_reserved_gb": "reserved",
        "health/cuda_allocated_gb": "allocated",
        "health/host_rss_gb": "host, this process",
    }
    lines = [Line(label, column, look) for label, column, look in _looked(_labelled(signals, names))]
    about = "In 10⁹ bytes, of this rank. What rises and never falls again is a leak."
    return _panel("memory", "Memory", about, lines, claims=names, from_zero=True)


def _labelled(signals: Signals, names: Mapping[str, str]) -> dict[str, Column]:
    """Columns by label, of the names that a run has."""
    return {label: signals[name] for name, label in names.items() if name in signals}


_MAKERS: tuple[Maker, ...] = (
    _loss,
    _objective,
    _named(
        "gap",
        "Gap between evaluation and training",
        "Evaluation loss less training loss, both cross-entropies. One that grows is overfitting.",
        {"eval/gap": "gap"},
        linear=True,
        bounds=lambda config: (Bound(0.0, "no gap"),),
    ),
    _rate,
    _norm,
    _named(
        "cosine",
        "Direction of consecutive gradients",
        "Cosine between the gradients of two consecutive steps. Clearly below zero, steps undo each other.",
        {"health/grad_cosine_sim": "cosine"},
        linear=True,
        bounds=lambda config: (Bound(0.0, "no common direction"),),
    ),
    _noise,
    _named(
        "entropy",
        "Entropy of the outputs",
        "In nats, with its 95% interval. A steady fall is a model that grows certain of everything.",
        {"health/output_entropy": "entropy"},
        linear=True,
        bounds=lambda config: (Bound(config.rl_entropy_floor, "floor", limit=True),),
    ),
    _named(
        "throughput",
        "Throughput",
        "Loss-bearing tokens a second, without evaluation and checkpoints.",
        {"train/tokens_per_sec_global": "all ranks", "train/tokens_per_sec": "this rank"},
        smoothed=True,
        from_zero=True,
    ),
    _named(
        "step-time",
        "Time of a step",
        "Seconds an optimizer step, without evaluation and checkpoints. Lone high values are waits.",
        {"train/step_time_s": "seconds"},
        smoothed=True,
        from_zero=True,
    ),
    _named(
        "mfu",
        "Share of the device's peak",
        "Floating-point operations of the model over what the device can do.",
        {"train/mfu": "share"},
        from_zero=True,
    ),
    _named(
        "efficiency",
        "Tokens that train",
        "Loss-bearing tokens over all tokens.",
        {"health/token_efficiency": "share"},
        from_zero=True,
    ),
    _memory,
    _named(
        "rounding",
        "Updates lost to rounding",
        "Per cent of the elements whose update was too small for the parameter's number format.",
        {"health/update_lost_pct": "per cent"},
        from_zero=True,
    ),
)


# -- what no panel claims -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Others:
    """Signals without a chart of their own above."""

    panels: list[Panel]
    constant: list[tuple[str, float]]
    """Names that had one value throughout."""
    left_out: int


def others_of(signals: Signals, claimed: Iterable[str], most: int) -> Others:
    """A small panel for each number that is not told yet, as far as there is room."""
    told = {STEP_KEY, *_TIMES, *claimed}
    panels: list[Panel] = []
    constant: list[tuple[str, float]] = []
    left_out = 0
    for name in signals:
        column = signals.numbers(name)
        if name in told or not column:
            continue
        if column.value.min() == column.value.max():
            constant.append((name, float(column.value[0])))
        elif len(panels) < most:
            lines = (Line(name, signals[name], LOOKS[0], error=signals[f"{name}_se"]),)
            panels.append(Panel(f"other-{len(panels)}", name, "", lines))
        else:
            left_out += 1
    return Others(panels, constant, left_out)


#: Names of rows that are told elsewhere on the page.
_TIMES = ("time", "train/eval_s", "train/checkpoint_s")
