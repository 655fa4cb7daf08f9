"""Alarms become episodes, episodes become a story in the order in which things began."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from palingenesis.events import Event
from palingenesis.record.reader import Run
from palingenesis.report.episodes import over_in_words, pair_alarms
from palingenesis.report.facts import gather
from palingenesis.report.moments import what_came_first
from palingenesis.report.words import plain


def alarm(step: int, layer: str = "fc", diagnosis: str = "vanishing", **fields: Any) -> Event:
    own = {
        "layer": layer,
        "diagnosis": diagnosis,
        "since": step - 10,
        "value": -4.0,
        "baseline": -1.0,
        **fields,
    }
    return Event("alarm", step, "warning", f"{layer} {diagnosis}", own)


def cleared(step: int, since: int, layer: str = "fc", diagnosis: str = "vanishing", **fields: Any) -> Event:
    own = {"layer": layer, "diagnosis": diagnosis, "since": since, "reason": "in_range", **fields}
    return Event("alarm_cleared", step, "info", "over", own)


def test_an_alarm_is_paired_with_its_clearing() -> None:
    first, other, second = pair_alarms(
        [alarm(20), alarm(20, "head"), cleared(50, 20), alarm(80), cleared(90, 20, "head")]
    )
    assert (first.cleared_step, other.cleared_step, second.cleared_step) == (50, 90, None)
    assert first.decades == -3


def test_a_parameters_alarm_is_not_its_layers() -> None:
    layer, bias = pair_alarms(
        [alarm(20), alarm(20, parameter="bias"), cleared(50, 20, parameter="bias")],
    )
    assert (layer.cleared_step, bias.cleared_step) == (None, 50)


def test_an_alarm_that_becomes_another_ends_there() -> None:
    first, second = pair_alarms([alarm(20), alarm(40, diagnosis="no_gradient")])
    assert (first.cleared_step, first.ended, second.cleared_step) == (40, "changed", None)
    assert over_in_words(first) == "turned into another alarm at step 40"
    assert over_in_words(second) == "not cleared"


def test_an_alarm_ends_in_range_or_with_its_level_accepted() -> None:
    back, stayed = pair_alarms(
        [alarm(20), alarm(20, "head"), cleared(50, 20), cleared(60, 20, "head", reason="level_accepted")]
    )
    assert (back.ended, back.accepted, over_in_words(back)) == ("in_range", False, "cleared at step 50")
    assert (stayed.ended, stayed.accepted) == ("level_accepted", True)
    assert over_in_words(stayed) == "new level accepted at step 60"


def test_what_began_first_is_told_first() -> None:
    spike = Event("loss_spike", 15, "warning", "the loss jumped", {})
    events = [spike, alarm(20)]
    moments = what_came_first(events, pair_alarms(events))
    assert [(m.kind, m.onset) for m in moments] == [("alarm", 10), ("loss_spike", 15)]
    assert plain(moments[0].sentence) == (
        "The gradient of fc fell to 1/1,000 of its own baseline at step 10; the alarm came at step 20 "
        "and was not cleared."
    )
    assert plain(moments[1].sentence) == "The loss jumped."


def test_an_incident_is_one_moment_told_by_its_origin() -> None:
    incident = Event(
        "incident", 20, "warning", "together",
        {"incident": "i", "origin": "head", "layers": ["head", "fc"], "why": "only it has no_gradient"},
    )  # fmt: skip
    events = [incident, alarm(20, incident="i"), alarm(20, "head", "no_gradient", incident="i", value=None)]
    (moment,) = what_came_first(events, pair_alarms(events))
    assert moment.layer == "head"
    assert plain(moment.sentence) == (
        "head has had no gradient since step 10; the alarm came at step 20 and was not cleared. One more "
        "layer left its range in the same incident. Look first at head: only it has no gradient."
    )


def test_an_incident_whose_origin_has_no_alarm_is_told_without_its_reason() -> None:
    incident = Event("incident", 20, "warning", "together", {"incident": "i", "origin": "gone", "why": "so"})
    events = [incident, alarm(20, incident="i"), alarm(30, "head", incident="i")]
    (moment,) = what_came_first(events, pair_alarms(events))
    assert moment.layer == "fc"
    assert "Look first" not in plain(moment.sentence)


def test_parameters_that_get_an_optimizer_later_are_no_strays(run_of: Callable[[str], Run]) -> None:
    facts = gather(run_of("healthy"))
    told = Event("not_optimized", 0, "warning", "", {"parameters": ["a", "b", "c"]})
    changed = {"optimized": ["a"], "frozen": ["b"], "not_optimized": ["d"]}
    later = Event("parameters_changed", 50, "warning", "", changed)
    assert dataclasses.replace(facts, events=(told, later)).not_optimized == ["c", "d"]
    assert facts.not_optimized == []


def test_the_broken_layer_comes_first(run_of: Callable[[str], Run]) -> None:
    facts = gather(run_of("faulty"))
    assert facts.moments[0].layer == "model.layers.2.mlp.up_proj"
    assert facts.moments[0].onset == 310
    assert [m.kind for m in facts.moments] == ["incident", "alarm", "loss_spike", "nonfinite"]


def test_what_a_resume_has_overtaken_is_no_moment(run_of: Callable[[str], Run]) -> None:
    facts = gather(run_of("resumed"))
    assert [e.superseded for e in facts.episodes] == [True]
    assert facts.moments == ()
    assert facts.open_episodes == []
    assert facts.last_step == 500


def test_a_missing_loss_is_not_a_nan(run_of: Callable[[str], Run]) -> None:
    assert not gather(run_of("bare")).loss_given.any()
    assert gather(run_of("all_nan")).loss_given.all()
    facts = gather(run_of("faulty"))
    assert facts.loss_given.all()
    assert facts.counts["nonfinite"] == 1


def test_counts_of_a_killed_run_come_from_its_record(run_of: Callable[[str], Run]) -> None:
    facts = gather(run_of("killed"))
    assert facts.counts["checks"] == 20
    assert facts.counts["alarms_accepted"] == 0
    assert facts.counts["alarms"] == 0
    assert facts.last_step == 207


def test_counts_of_a_resumed_run_are_of_all_that_counts(run_of: Callable[[str], Run]) -> None:
    facts = gather(run_of("resumed"))
    assert facts.info["end"]["counts"]["checks"] == 30
    assert facts.counts["checks"] == 50
    assert facts.counts["alarms"] == 0


def test_counts_tell_what_came_back_from_what_was_accepted(run_of: Callable[[str], Run]) -> None:
    counts = gather(run_of("accepted")).counts
    assert (counts["alarms"], counts["alarms_cleared"], counts["alarms_accepted"]) == (2, 1, 1)


def test_an_alarm_is_possible_after_enough_judged_checks(run_of: Callable[[str], Run]) -> None:
    facts = gather(run_of("healthy"))
    assert (facts.first_judged_step, facts.alarms_possible_from) == (90, 100)
    assert gather(run_of("warming_up")).alarms_possible_from is None
