"""The report as data, for scripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from palingenesis.findings.finding import Report
from palingenesis.findings.render import to_json as findings_document
from palingenesis.record.format import encodable
from palingenesis.report.episodes import Episode
from palingenesis.report.facts import Facts, gather
from palingenesis.report.verdicts import overall_of
from palingenesis.report.words import plain

if TYPE_CHECKING:
    from palingenesis.record.reader import Run


def to_json(run: Run) -> dict[str, Any]:
    """The conclusions of a report as a dict that ``json.dumps(…, allow_nan=False)`` accepts.

    ====================  ======================================================================
    ``verdict``           the word: CRITICAL, NOT MONITORED, PARTLY MONITORED, WARNING, INTERRUPTED,
                          UNKNOWN or HEALTHY
    ``sentence``          the fact that decided it
    ``record_verdict``    the word for the events alone, without findings over the whole run, as
                          ``pgs train`` has it
    ``run``               ``folder``, ``last_step`` and what run.json holds: ``name``, ``run_id``, ``start``,
                          ``end`` (null while the run has none), ``model``, ``optimizer``, ``config`` …
    ``counts``            ``alarms, alarms_cleared`` (back in range), ``alarms_accepted`` (out of range until
                          that became the new normal), ``loss_spikes, nonfinite, skipped_steps, checks,
                          checks_without_gradients``
    ``first``             what went wrong, in the order in which it began: ``step, severity, kind, layer``
                          (or null) and a ``sentence`` for people
    ``findings``          conclusions about the whole run, the worst first: ``check, severity, message,
                          evidence, fix, since, confidence, otherwise, next`` as every command has them
    ``alarms``            one entry an episode: ``layer, diagnosis, step`` (of the alarm), ``since`` (first
                          check out of range), ``cleared_step`` (or null), ``ended`` (``in_range``,
                          ``level_accepted``, ``changed`` into another alarm, or null while it has not),
                          ``parameter, value, baseline`` (log10 norms), ``std, sigma, relative, cause,
                          incident, superseded`` (the step was run again after a resume)
    ``incidents``         alarms that began together: ``incident, step, origin`` (the layer to look at first),
                          ``layers, diagnosis, alarms, why``
    ``unconfirmed``       layers out of range at the last check, too late for an alarm: ``step, layer,
                          diagnosis``
    ``events``            every event of the record with its own fields, ``seq`` and ``time``
    ``spikes``            what was in the batch at a spike: ``step, event, loss, samples`` and more
    ``monitored``         ``layers`` watched, ``not_watched`` (layer and reason), ``checks``,
                          ``checks_without_gradients``, ``first_judged_step`` (null: no layer was judged),
                          ``alarms_possible_from`` (null: no alarm could fire), ``not_optimized`` (parameters
                          that train, but that no optimizer holds), ``guard_every_step``, ``gradients``,
                          ``loss`` (whether one was seen), ``signal_unavailable`` and ``problems`` (what
                          cannot be read of the record, and which events it lacks)
    ====================  ======================================================================

    Numbers that JSON cannot hold are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
    """
    facts = gather(run)
    word, told = overall_of(facts)
    document = {
        "verdict": word,
        "sentence": told,
        "record_verdict": facts.verdict,
        "run": {"folder": str(facts.folder), "last_step": facts.last_step, **_about(facts.info)},
        "counts": facts.counts,
        "first": [
            {
                "step": moment.onset,
                "severity": moment.severity,
                "kind": moment.kind,
                "layer": moment.layer,
                "sentence": plain(moment.sentence),
            }
            for moment in facts.moments
        ],
        "findings": findings_document(Report("report", facts.findings))["findings"],
        "alarms": [_alarm(episode) for episode in facts.episodes],
        "incidents": [
            {"step": event.step, **{key: event.fields.get(key) for key in _INCIDENT}}
            for event in facts.of_kind("incident")
        ],
        "unconfirmed": [
            {"step": step, "layer": layer, "diagnosis": diagnosis}
            for step, layer, diagnosis in facts.unconfirmed
        ],
        "events": [_event(event) for event in facts.events],
        "spikes": [dataclasses.asdict(spike) for spike in facts.spikes],
        "monitored": _monitored(facts),
    }
    return {key: encodable(value) for key, value in document.items()}


_INCIDENT = ("incident", "origin", "layers", "diagnosis", "alarms", "why")
_IN_MONITORED = {"layers", "not_watched", "gradients"}
_CHAIN = {"prev", "hash"}


def _about(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key not in _IN_MONITORED}


def _alarm(episode: Episode) -> dict[str, Any]:
    return dataclasses.asdict(episode)


def _event(event: Any) -> dict[str, Any]:
    own = {key: value for key, value in event.fields.items() if key not in _CHAIN}
    return {
        "step": event.step,
        "event": event.event,
        "severity": event.severity,
        "message": event.message,
        **own,
    }


def _monitored(facts: Facts) -> dict[str, Any]:
    return {
        "layers": list(facts.layers),
        "not_watched": facts.not_watched,
        "checks": facts.counts["checks"],
        "checks_without_gradients": facts.counts["checks_without_gradients"],
        "first_judged_step": facts.first_judged_step,
        "alarms_possible_from": facts.alarms_possible_from,
        "not_optimized": facts.not_optimized,
        "guard_every_step": facts.config.guard_every_step,
        "gradients": facts.info.get("gradients"),
        "loss": bool(facts.loss_given.any()),
        "signal_unavailable": [
            {"step": e.step, "signal": e.signal, "reason": e.reason, "layers": e.layers}
            for e in facts.of_kind("signal_unavailable")
        ],
        "problems": [*facts.problems, *([facts.lacking] if facts.lacking else [])],
    }
