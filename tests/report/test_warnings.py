"""How bounds and ranks are told: in the verdict, on the timeline, in the story and in the tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.report.runs import Script, block_names, falling_losses, healthy_norms, write_run

from palingenesis import Event, MonitorConfig, load_run
from palingenesis.record.reader import Run
from palingenesis.report import render_text, write_html
from palingenesis.report.facts import gather
from palingenesis.report.marks import Mark, marks_of
from palingenesis.report.words import plain
from palingenesis.watch.bounds import BoundsWatch
from palingenesis.watch.ranks import RankWatch

RANK = "health/stable_rank/"
NAMES = block_names(4)
UP, Q = NAMES[5], NAMES[1]


class Outlier:
    """What ``signals.ranks`` finds."""

    norm, others = 1e-6, 0.5

    def __init__(self, layer: str, rank: int) -> None:
        self.layer, self.rank = layer, rank


class Divergence:
    """What ``signals.replicas`` finds."""

    spread = 0.25

    def __init__(self, layer: str, parameter: str, ranks: tuple[int, ...]) -> None:
        self.layer, self.parameter, self.ranks = layer, parameter, ranks


def bound_events(*, fresh: bool = False) -> list[Event]:
    """Stable ranks of two layers that fall and of which one comes back; drift; one low from the start."""
    watch = BoundsWatch(MonitorConfig())
    watch.fresh = frozenset(NAMES) if fresh else frozenset()
    drift = f"health/weight_drift/{NAMES[2]}"
    others = {f"health/weight_drift/{name}": 0.2 for name in (UP, Q)}
    rows = [
        {RANK + UP: 9.0, RANK + Q: 9.0, f"{RANK}{NAMES[2]}": 2.0, drift: 0.0},
        {RANK + UP: 2.0, RANK + Q: 1.5, drift: 0.1},
        {RANK + UP: 9.0, RANK + Q: 1.5, drift: 0.7} | others,
    ]
    return [event for i, row in enumerate(rows) for event in watch.check(1 + 100 * i, row)]


def rank_events() -> list[Event]:
    """One rank apart in two layers, of which one is back soon and the other later."""
    watch, found = RankWatch(), []
    both = [Outlier(UP, 3), Outlier(Q, 3)]
    for step, outliers in ((100, both), (110, both[:1]), (120, both[:1]), (130, []), (140, [])):
        found += watch.check_gradients(step, outliers)
    return found


def recorded(folder: Path, events: list[Event]) -> Run:
    return load_run(
        write_run(folder, Script(NAMES, healthy_norms(60, len(NAMES)), falling_losses(600), extra=events))
    )


def marks(run: Run, lane: str) -> list[Mark]:
    return [mark for mark in marks_of(gather(run), 1.0, 600.0) if mark.lane == lane]


def test_a_bound_that_was_crossed_is_a_warning_also_once_it_is_cleared(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", bound_events())
    assert run.verdict == "WARNING"
    assert run.verdict_sentence.startswith(f"step 101: {Q}: stable rank 1.5 is below 3")
    assert run.verdict_sentence.endswith("(and 2 more)")
    only = [event for event in bound_events() if event.layer == UP]
    assert [event.event for event in only] == ["bound_crossed", "bound_cleared"]
    assert recorded(tmp_path / "cleared", only).verdict == "WARNING"


def test_what_was_so_at_the_start_is_no_finding(tmp_path: Path) -> None:
    at_start = [event for event in bound_events() if event.event == "bound_at_start"]
    drift = [event for event in bound_events(fresh=True) if event.diagnosis == "weight_drift"]
    assert len(at_start) == len(drift) == 1
    assert recorded(tmp_path / "run", [*at_start, *drift]).verdict == "HEALTHY"


def test_the_timeline_shows_from_when_to_when(tmp_path: Path) -> None:
    found = {
        mark.label: mark for mark in marks(recorded(tmp_path / "run", bound_events()), "Weights and outputs")
    }
    spans = {label: (mark.severity, mark.start, mark.end) for label, mark in found.items()}
    assert spans == {
        f"{NAMES[2]}, stable rank": ("info", 1.0, None),
        f"{Q}, stable rank": ("warning", 101.0, 600.0),
        f"{UP}, stable rank": ("warning", 101.0, 201.0),
        f"{NAMES[2]}, weight drift": ("warning", 201.0, 600.0),
    }


def test_many_that_cross_together_are_one_mark_until_the_last_is_back(tmp_path: Path) -> None:
    watch = BoundsWatch(MonitorConfig())
    rows = [dict.fromkeys((RANK + name for name in NAMES[1:9]), value) for value in (9.0, 2.0, 2.0, 9.0)]
    rows[2][RANK + NAMES[1]] = 9.0
    events = [event for i, row in enumerate(rows) for event in watch.check(1 + 100 * i, row)]
    (mark,) = marks(recorded(tmp_path / "run", events), "Weights and outputs")
    assert (mark.start, mark.end) == (101.0, 301.0)


def test_a_rank_is_apart_until_its_last_layer_is_back(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", rank_events())
    (mark,) = marks(run, "Ranks")
    assert (mark.label, mark.start, mark.end) == (f"{UP}, rank 3 apart", 100.0, 140.0)
    (moment,) = gather(run).moments
    assert plain(moment.sentence).startswith(f"Rank 3: its own gradient of {UP} has norm 1e-06")


def test_replicas_that_differ_are_critical(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", RankWatch().check_replicas(300, [Divergence(UP, f"{UP}.weight", (3,))]))
    assert run.verdict == "CRITICAL"
    assert run.verdict_sentence.startswith(f"step 300: {UP}: replicas of {UP}.weight differ: rank 3")
    (mark,) = marks(run, "Ranks")
    assert (mark.label, mark.severity, mark.end) == (f"{UP}, replicas differ", "critical", None)


@pytest.mark.parametrize("width", [40, 100])
def test_the_page_and_the_text_tell_them_in_words(tmp_path: Path, width: int) -> None:
    events = [*bound_events(), *rank_events()]
    run = recorded(tmp_path / "run", events)
    text = " ".join(render_text(run, width).split())
    page = write_html(run).read_text(encoding="utf-8")
    assert "Weights and outputs" in page
    for words in ("bound crossed", "bound at start", "rank outlier cleared", "weight drift 0.7 of the norm"):
        assert words in page, words
    for words in ("stable rank 1.5 is below 3, from 9 at the start", "eight drift 0.7 of the norm"):
        assert words in text, words
