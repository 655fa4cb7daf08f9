"""The tables of the page, as rows that the template only has to print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from palingenesis.config import MonitorConfig
from palingenesis.events import Event
from palingenesis.report.episodes import Episode
from palingenesis.report.facts import Facts
from palingenesis.report.heatmap import describe_value
from palingenesis.report.history import History
from palingenesis.report.moments import diagnosis_in_words, layer_of
from palingenesis.report.options import option_value
from palingenesis.report.words import count, duration, moment, number, step_number, times, visible, whole

_LONG_MESSAGE = 320
_LONG_NAME, _NAMED = 80, 6
_SEVERITIES = ("critical", "warning", "info")


@dataclass(frozen=True)
class EventRow:
    anchor: str
    step: str
    event: str
    severity: str
    layer: str
    message: str
    superseded: bool


@dataclass(frozen=True)
class LayerRow:
    name: str
    first: str
    last: str
    baseline: str
    farthest: str
    missing: str
    alarms: str


@dataclass(frozen=True)
class OptionRow:
    name: str
    value: str
    meaning: str
    changed: bool


@dataclass(frozen=True)
class Rows:
    """Rows to show, and how many there are in all."""

    rows: list[Any]
    total: int

    @property
    def left_out(self) -> int:
        return self.total - len(self.rows)


def event_anchor(place: int) -> str:
    """Of the row of an event, by its place in the record."""
    return f"event-{place}"


def kept_events(facts: Facts, most: int) -> list[int]:
    """Places of the events that have a row; when there are too many, the severe ones do."""
    order = {severity: rank for rank, severity in enumerate(_SEVERITIES)}
    positions = sorted(
        range(len(facts.events)), key=lambda i: (order.get(facts.events[i].severity, len(order)), i)
    )
    return sorted(positions[:most])


def event_rows(facts: Facts, kept: Iterable[int], name_length: int) -> Rows:
    """The events in the order of the record."""
    rows = [_event_row(place, facts.events[place], name_length) for place in kept]
    return Rows(rows, len(facts.events))


def _event_row(place: int, event: Event, name_length: int) -> EventRow:
    layer = layer_of(event)
    return EventRow(
        anchor=event_anchor(place),
        step=step_number(event.step),
        event=event.event.replace("_", " "),
        severity=event.severity,
        layer=visible(layer, name_length) if layer else "",
        message=visible(event.message, max(_LONG_MESSAGE, name_length)),
        superseded=bool(event.superseded),
    )


def layer_rows(history: History, episodes: Iterable[Episode], most: int, name_length: int) -> Rows:
    """A row a layer in forward order; of too many, those farthest from their baseline are kept."""
    alarms: dict[str, list[str]] = {}
    for episode in episodes:
        if not episode.superseded:
            what = diagnosis_in_words(episode.diagnosis) + (" (accepted)" if episode.accepted else "")
            alarms.setdefault(episode.layer, []).append(what)
    norms = history.norms
    layers = range(len(norms.names))
    worst = np.fmax.reduce(np.abs(history.departure), axis=0, initial=-1.0)
    ranked = sorted(layers, key=lambda i: (norms.names[i] not in alarms, -worst[i]))
    rows = [
        _layer_row(history, i, alarms.get(norms.names[i], []), name_length) for i in sorted(ranked[:most])
    ]
    return Rows(rows, len(norms.names))


def _layer_row(history: History, layer: int, alarms: list[str], name_length: int) -> LayerRow:
    norms = history.norms
    departure = history.departure[:, layer]
    farthest = "–"
    if np.isfinite(departure).any():
        check = int(np.nanargmax(np.abs(departure)))
        farthest = f"{times(float(departure[check]))} it, step {step_number(norms.steps[check])}"
    mean = history.mean[:, layer]
    known = mean[np.isfinite(mean)]
    masks = (
        ("zero", norms.zero),
        ("None", norms.absent),
        ("not watched", norms.unwatched),
        ("not finite", norms.nonfinite),
    )
    missing = [f"{int(mask[:, layer].sum()):,} {words}" for words, mask in masks if mask[:, layer].any()]
    last = len(norms.steps) - 1
    return LayerRow(
        name=visible(norms.names[layer], name_length),
        first=_norm(history, 0, layer),
        last=_norm(history, last, layer),
        baseline=number(float(10 ** known[-1]), 3) if len(known) else "–",
        farthest=farthest,
        missing=", ".join(missing) or "–",
        alarms=", ".join(f"{n}× {what}" if n > 1 else what for what, n in Counter(alarms).items()) or "–",
    )


def _norm(history: History, check: int, layer: int) -> str:
    norms = history.norms
    value = float(norms.norm[check, layer])
    if not np.isfinite(value) or value == 0:
        return describe_value(history, check, layer)
    return number(value, 3)


def option_rows(stored: dict[str, Any]) -> list[OptionRow]:
    """Every option the run had, with its meaning and whether it differs from the default."""
    rows = []
    for name, value in stored.items():
        field = MonitorConfig.model_fields.get(name)
        default = None if field is None else field.default
        same = (
            list(value) == list(default) if isinstance(value, (list, tuple)) and default else value == default
        )
        rows.append(
            OptionRow(
                name=visible(name),
                value=option_value(value),
                meaning=(field.description or "") if field else "not known to this version",
                changed=not same,
            )
        )
    return rows


def key_figures(facts: Facts) -> list[tuple[str, str, str]]:
    """The figures at the head of the page: what, how many, and a remark."""
    counts = facts.counts
    finite = facts.loss[np.isfinite(facts.loss)]
    figures = [
        ("Steps", step_number(facts.last_step), _took(facts)),
        ("Checks", f"{counts['checks']:,}", _judged(facts)),
        ("Layers watched", f"{len(facts.layers):,}", _skipped_layers(facts)),
        ("Layer alarms", f"{counts['alarms']:,}", _alarms_now(facts)),
        ("Loss spikes", f"{counts['loss_spikes']:,}", ""),
        (
            "Non-finite",
            f"{counts['nonfinite']:,}",
            {0: "", 1: "episode"}.get(counts["nonfinite"], "episodes"),
        ),
    ]
    if len(finite):
        figures.append(("Loss", number(float(finite[-1])), f"from {number(float(finite[0]))}"))
    return figures


def _took(facts: Facts) -> str:
    end = facts.end
    spent = duration(facts.info.get("start"), end.get("time")) if end else None
    return f"in {spent}" if spent else ("" if end else "no end in the record")


def _judged(facts: Facts) -> str:
    if not facts.checks:
        return ""
    if facts.alarms_possible_from is None:
        return "too few for an alarm"
    return f"alarms possible from step {step_number(facts.alarms_possible_from)}"


def _alarms_now(facts: Facts) -> str:
    if not facts.counts["alarms"]:
        return ""
    accepted = facts.counts["alarms_accepted"]
    told = f"{len(facts.open_episodes):,} not cleared"
    return f"{told}, {accepted:,} accepted" if accepted else told


def _skipped_layers(facts: Facts) -> str:
    return f"{len(facts.not_watched):,} not watched" if facts.not_watched else ""


def monitored(facts: Facts) -> list[tuple[str, str]]:
    """What was monitored, as pairs of a question and its answer."""
    config, counts = facts.config, facts.counts
    pairs = [
        ("Layers", _layers_answer(facts)),
        ("Checks", f"{count(counts['checks'], 'check')}, one every {count(config.check_every, 'step')}"),
        ("Checks without any gradient", f"{counts['checks_without_gradients']:,}"),
        ("Alarms possible", _alarms_answer(facts)),
        ("Layers that never had a baseline", _never_judged(facts)),
        (
            "Between two checks",
            "the largest norm of every layer and the first step that was not finite"
            if config.guard_every_step
            else "only the loss: guard_every_step was off, so a fault that came and went there is not seen",
        ),
        (
            "Gradients",
            _GRADIENTS.get(str(facts.info.get("gradients")), "not known whether they were clipped first"),
        ),
        ("Loss", _loss_answer(facts)),
        ("Parameters that train but are in no optimizer", _strays(facts)),
        (
            "Out of range at the last check, with no second one to confirm it",
            _named([f"{layer} ({diagnosis_in_words(what)})" for _, layer, what in facts.unconfirmed]),
        ),
        ("Steps skipped by the gradient scaler", f"{counts['skipped_steps']:,}"),
    ]
    resumed = facts.info.get("resumed_from") or []
    if resumed:
        pairs.append(("Resumed", "from step " + ", ".join(step_number(step) for step in resumed)))
    return pairs


_GRADIENTS = {
    "raw": "read before clipping",
    "clipped": "read after clipping; what that does to all layers alike was taken out before one was judged",
}


def _strays(facts: Facts) -> str:
    if not (facts.info.get("optimizer") or {}).get("groups"):
        return "not known: the monitor was given no optimizer"
    return _named(facts.not_optimized)


def _named(names: list[str]) -> str:
    shown = ", ".join(visible(name, _LONG_NAME) for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{shown}{more}" if names else "none"


def _layers_answer(facts: Facts) -> str:
    watched = len(facts.layers)
    model = facts.info.get("model") or {}
    total = model.get("layers") or watched + len(facts.not_watched)
    return f"{watched:,} of {count(int(total), 'layer')}"


def _alarms_answer(facts: Facts) -> str:
    if facts.alarms_possible_from is None:
        config = facts.config
        return (
            f"never: a baseline needs {count(config.warmup, 'check')} with gradients, an alarm "
            f"{config.consecutive} more"
        )
    first, judged = step_number(facts.alarms_possible_from), count(facts.config.consecutive, "check")
    return f"from step {first}, after {judged} against a finished baseline"


def _never_judged(facts: Facts) -> str:
    if not len(facts.judged):
        return "all"
    return f"{max(0, len(facts.layers) - int(facts.judged.max())):,}"


def _loss_answer(facts: Facts) -> str:
    if not facts.loss_given.any():
        return "never passed to the monitor, so nothing can be said about it"
    finite = int(np.isfinite(facts.loss).sum())
    bad = int((~np.isfinite(facts.loss) & facts.loss_given).sum())
    return f"{count(finite, 'finite value')}" + (f", {count(bad, 'non-finite value')}" if bad else "")


def gaps(facts: Facts) -> list[str]:
    """What the monitor said it could not see, and where it failed."""
    told = [
        f"step {step_number(e.step)}: {visible(e.message, _LONG_MESSAGE)}"
        for e in facts.of_kind("signal_unavailable")
    ]
    return told + [
        f"step {step_number(e.step)}: {visible(e.message, _LONG_MESSAGE)}"
        for e in facts.of_kind("monitor_error")
    ]


def not_watched(facts: Facts, most: int) -> list[tuple[str, list[str], int]]:
    """Reasons with their layers, and how many of them are not named."""
    reasons: dict[str, list[str]] = {}
    for entry in facts.not_watched:
        reasons.setdefault(visible(entry.get("reason", "")), []).append(visible(entry.get("layer", ""), 200))
    return [(reason, layers[:most], max(0, len(layers) - most)) for reason, layers in reasons.items()]


def about_run(facts: Facts) -> list[tuple[str, str]]:
    """Who and what, for the foot of the page."""
    info, model = facts.info, facts.info.get("model") or {}
    versions = info.get("versions") or {}
    optimizer, parallel = info.get("optimizer") or {}, info.get("parallelism") or {}
    pairs = [
        ("Run", visible(info.get("run_id") or "–")),
        ("Started", moment(info.get("start"))),
        ("Ended", _ended(facts)),
        (
            "Model",
            f"{visible(model.get('class', '–'), 120)}, {whole(model.get('parameters'))} parameters, "
            f"{whole(model.get('trainable'))} trained",
        ),
        ("Optimizer", visible(optimizer.get("class", "–"), 120)),
        ("Processes", whole(parallel.get("world_size"))),
        ("Versions", ", ".join(f"{visible(k)} {visible(v)}" for k, v in versions.items()) or "–"),
        ("Folder", visible(facts.folder)),
    ]
    return pairs


def _ended(facts: Facts) -> str:
    end = facts.end
    if end is None:
        return "not in the record: the process was killed, or is still running"
    error = f", {visible(end['error'], _LONG_MESSAGE)}" if end.get("error") else ""
    return f"{moment(end.get('time'))}, {visible(end.get('reason', ''))}{error}"
