"""Each pathology is seen in records that have it, for several seeds, and not in their healthy twins."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.findings.more_runs import ALL, chain
from tests.findings.runs import (
    Builder,
    changed,
    event,
    healthy_rows,
    lr_too_high,
    no_zero_grad,
    nonfinite,
    packed_pair,
    write,
)
from tests.runlogs.made import made

from palingenesis.findings import Finding, Report
from palingenesis.findings.catalog import CATALOG
from palingenesis.findings.doubts import DOUBTS
from palingenesis.findings.limits import Limits
from palingenesis.findings.pathologies import PATHOLOGIES, pathologies_of

ROWS = {pathology.check: pathology for pathology in PATHOLOGIES}
SEEDS = range(2)
NAMES = [builder.__name__ for _, builder in ALL]


def found(run: Any, **options: Any) -> list[str]:
    return [finding.check for finding in pathologies_of(run, **options)]


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """What every sick record of the first seed shows, by its builder's name."""
    folder = tmp_path_factory.mktemp("sick")
    return {
        builder.__name__: pathologies_of(builder(folder / builder.__name__, SEEDS[0], True))
        for _, builder in ALL
    }


@pytest.mark.parametrize(("check", "builder"), ALL, ids=NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_record_that_has_it_shows_it_and_its_twin_does_not(
    check: str, builder: Builder, seed: int, sick: dict[str, list[Finding]], tmp_path: Path
) -> None:
    seen = (
        sick[builder.__name__] if seed == SEEDS[0] else pathologies_of(builder(tmp_path / "sick", seed, True))
    )
    (finding,) = [one for one in seen if one.check == check]
    assert finding.message
    assert finding.fix
    assert finding.evidence
    assert check not in found(builder(tmp_path / "twin", seed, False))


@pytest.mark.parametrize("seed", SEEDS)
def test_packed_samples_that_see_each_other_show_against_an_unpacked_run(seed: int, tmp_path: Path) -> None:
    sick, unpacked = packed_pair(tmp_path / "sick", seed, True)
    assert found(sick, unpacked=unpacked) == ["run.packing_leak"]
    assert found(sick) == []  # it takes both
    twin, unpacked = packed_pair(tmp_path / "twin", seed, False)
    assert found(twin, unpacked=unpacked) == []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [40, 600])
def test_healthy_runs_short_and_long_have_no_finding(seed: int, count: int, tmp_path: Path) -> None:
    assert found(write(tmp_path / "run", healthy_rows(seed, count))) == []


def test_every_pathology_has_a_sick_record_and_an_entry() -> None:
    seen = {check for check, _ in ALL} | {"run.packing_leak"}
    assert seen == ROWS.keys()
    assert ROWS.keys() <= CATALOG.keys()


def test_what_explains_another_comes_before_it() -> None:
    order = [pathology.check for pathology in PATHOLOGIES]
    for pathology in PATHOLOGIES:
        for cause in pathology.follows_from:
            mutual = pathology.check in ROWS[cause].follows_from
            assert mutual or order.index(cause) < order.index(pathology.check)


@pytest.mark.parametrize(("spike", "layer"), [(300, 100), (100, 300), (200, 200)])
def test_of_two_that_can_explain_each_other_the_first_does(spike: int, layer: int, tmp_path: Path) -> None:
    events = [
        event("loss_spike", spike, value=9.0, baseline=1.0),
        event("gradient_spike", layer, layer="head", layers=["head"], ratio=90.0),
    ]
    findings = pathologies_of(write(tmp_path / "run", healthy_rows(0), events))
    first = "run.layer_exploding" if layer < spike else "run.loss_spike"
    assert findings[0].check == first
    assert findings[1].explained_by == (first,)
    assert findings[0].explained_by == ()


def test_a_spike_before_the_monitor_could_ring_is_told_beside_one_that_rang(tmp_path: Path) -> None:
    rows = changed(healthy_rows(0), train__loss=lambda step, old: old * (5 if step in (150, 300) else 1))
    run = write(tmp_path / "run", rows, [event("loss_spike", 300, value=9.0, baseline=1.0)])
    [spike] = [finding for finding in pathologies_of(run) if finding.check == "run.loss_spike"]
    assert spike.evidence["steps"] == [150, 300]
    assert "at step 150" in spike.message and "again at step 300" in spike.message


def test_remedies_that_are_not_there_yet_are_no_options() -> None:
    """Otherwise it is time to name them in the fix."""
    from palingenesis.sft.config import TrainConfig

    options = {
        name
        for section in TrainConfig.model_fields.values()
        for name in section.annotation.model_fields  # type: ignore[union-attr]
    }
    for pathology in PATHOLOGIES:
        assert not options & set(pathology.not_yet)


def test_every_option_that_a_fix_names_exists(sick: dict[str, list[Finding]]) -> None:
    from palingenesis.sft.config import TrainConfig

    texts = [CATALOG[check].fix for check in ROWS]
    texts += [finding.fix for findings in sick.values() for finding in findings]
    sections = {name: info.annotation for name, info in TrainConfig.model_fields.items()}
    named = {
        (section, option)
        for text in texts
        for section, option in re.findall(rf"(?<![/.\w])({'|'.join(sections)})\.(\w+)", text)
    }
    assert named
    for section, option in named:
        assert option in sections[section].model_fields, f"{section}.{option}"  # type: ignore[union-attr]


# -- causes and consequences -------------------------------------------------------------------------------


def test_a_consequence_names_its_cause_and_comes_after_it(tmp_path: Path) -> None:
    run = no_zero_grad(tmp_path / "run", 0, True)
    spikes = [event("loss_spike", step, value=9.0, baseline=1.0) for step in (100, 200, 300)]
    findings = pathologies_of(write(tmp_path / "both", _rows(run), spikes))
    assert findings[0].check == "run.no_zero_grad"
    by_check = {finding.check: finding for finding in findings}
    assert by_check["run.data_quality"].evidence["may_follow_from"] == ["run.no_zero_grad"]
    assert "may_follow_from" not in by_check["run.no_zero_grad"].evidence


def _rows(run: Any) -> list[dict[str, Any]]:
    """The rows of a record, as they went in."""
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_several_things_wrong_are_all_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = changed(
        healthy_rows(0),
        health__grad_cosine_sim=lambda step, _: rng.normal(-0.5, 0.1),
        health__update_lost_pct=lambda step, _: 90.0,
        health__cuda_utilization_pct=lambda step, _: 99.0,
    )
    assert sorted(found(write(tmp_path / "run", rows))) == [
        "run.lr_too_high",
        "run.memory_pressure",
        "run.updates_lost",
    ]


def test_what_began_first_and_explains_the_others_leads(tmp_path: Path) -> None:
    findings = pathologies_of(chain(tmp_path / "run", 0))
    assert findings[0].check == "run.worse_after_resume"
    assert findings[0].since == 301
    by_check = {finding.check: finding for finding in findings}
    assert "run.worse_after_resume" in by_check["run.lr_too_high"].explained_by
    assert by_check["run.nonfinite"].since == 551
    places = {finding.check: place for place, finding in enumerate(findings)}
    for finding in findings:
        assert all(places[cause] < places[finding.check] for cause in finding.explained_by)
    # A cause is shown before the worse things that it brought about.
    shown = [finding.check for finding in Report("explain", tuple(findings)).ordered]
    assert shown.index("run.worse_after_resume") < shown.index("run.nonfinite")


def test_what_began_later_explains_nothing(tmp_path: Path) -> None:
    """The schedule ends at step 400; the loss was flat long before."""
    rng = np.random.default_rng(0)
    rows = changed(
        healthy_rows(0),
        train__loss=lambda step, _: 2.0 * rng.lognormal(0, 0.03),
        eval__loss=lambda step, _: 2.0,
        train__lr=lambda step, _: 2e-5 * max(0.0, 1 - step / 400),
    )
    by_check = {one.check: one for one in pathologies_of(write(tmp_path / "run", rows))}
    assert by_check["run.lr_schedule"].since == 400
    assert by_check["run.lr_too_low"].explained_by == ()


def test_a_finding_says_how_sure_it_is_what_else_and_what_next(sick: dict[str, list[Finding]]) -> None:
    for check, builder in ALL:
        (finding,) = [one for one in sick[builder.__name__] if one.check == check]
        assert 0 < finding.confidence <= 1
        assert finding.next
        assert "{" not in finding.next
        assert finding.otherwise or check in ("run.tracker_rows", "run.other_warnings")


def test_what_another_finding_explains_is_less_sure(tmp_path: Path) -> None:
    spikes = [event("loss_spike", step, value=9.0, baseline=1.0) for step in (100, 200, 300)]
    alone = pathologies_of(write(tmp_path / "alone", healthy_rows(0), spikes))[0]
    run = no_zero_grad(tmp_path / "run", 0, True)
    both = pathologies_of(write(tmp_path / "both", _rows(run), spikes))
    (explained,) = [one for one in both if one.check == "run.data_quality"]
    assert explained.confidence < alone.confidence


def test_every_pathology_has_its_doubts() -> None:
    assert DOUBTS.keys() == ROWS.keys()
    for doubt in DOUBTS.values():
        doubt.next.format(since=1, third="a", half="b", twice="c")


# -- what a record may lack --------------------------------------------------------------------------------


def test_a_record_without_rows_has_no_finding(tmp_path: Path) -> None:
    assert found(write(tmp_path / "run", [])) == []


@pytest.mark.parametrize(
    "metric", sorted({key for row in healthy_rows(0) for key in row} - {"train/global_step"})
)
def test_a_metric_that_is_missing_is_no_symptom(metric: str, tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != metric} for row in healthy_rows(1)]
    assert found(write(tmp_path / "run", rows)) == []


def test_a_record_of_losses_alone_is_enough_to_see_spikes(tmp_path: Path) -> None:
    rows = [
        {"train/global_step": row["train/global_step"], "train/loss": row["train/loss"]}
        for row in healthy_rows(0)
    ]
    for place in (60, 150, 230, 333, 420, 510, 555):
        rows[place]["train/loss"] *= 5
    (finding,) = pathologies_of(write(tmp_path / "run", rows))
    assert finding.check == "run.data_quality"
    assert finding.evidence["steps"] == [61, 151, 231, 334, 421, 511, 556]


def test_metrics_of_text_or_nonsense_are_passed_over(tmp_path: Path) -> None:
    rows = [
        {**row, "train/loss": "much", "train/lr": None, "eval/loss": "NaN"} for row in healthy_rows(0, 50)
    ]
    assert "run.lr_too_low" not in found(write(tmp_path / "run", rows))


def test_events_that_were_run_again_or_are_ordinary_do_not_count(tmp_path: Path) -> None:
    spikes = [event("loss_spike", step, value=6.0, superseded=True) for step in (100, 200, 300)]
    ordinary = event("bound_crossed", 300, diagnosis="stable_rank", metric="m", value=1.0, ordinary=True)
    assert found(write(tmp_path / "run", healthy_rows(0), [*spikes, ordinary])) == []


def test_a_bound_that_was_cleared_is_no_symptom_any_more(tmp_path: Path) -> None:
    told = {"diagnosis": "weight_drift", "metric": "health/weight_drift/head", "value": 0.8}
    events = [event("bound_crossed", 300, **told), event("bound_cleared", 400, "info", **told)]
    assert found(write(tmp_path / "run", healthy_rows(0), events)) == []


def test_the_limits_can_be_moved(tmp_path: Path) -> None:
    run = lr_too_high(tmp_path / "run", 0, True)
    assert found(run) == ["run.lr_too_high"]
    assert found(run, limits=Limits(cosine_low=-0.9)) == []


def test_the_fix_is_a_value_where_the_learning_rate_is_known(tmp_path: Path) -> None:
    (finding,) = pathologies_of(lr_too_high(tmp_path / "run", 0, True))
    assert finding.fix == "train.learning_rate: 6.7e-06"
    assert finding.severity == "warning"


def test_what_is_not_finite_names_step_and_layer(tmp_path: Path) -> None:
    (finding,) = pathologies_of(nonfinite(tmp_path / "run", 0, True))
    assert finding.severity == "critical"
    assert finding.evidence["step"] == 501
    assert finding.evidence["layers"] == ["blocks.0", "head"]
    assert "blocks.0" in finding.message


def test_a_planned_restart_of_the_learning_rate_is_no_fault(tmp_path: Path) -> None:
    """Cosine with warm restarts: down in 120 steps, up in one."""
    rows = changed(
        healthy_rows(0), train__lr=lambda step, _: 1e-5 * (1 + np.cos(np.pi * (step % 120) / 120)) + 1e-9
    )
    assert found(write(tmp_path / "run", rows)) == []


def test_an_evened_out_imbalance_is_information(tmp_path: Path) -> None:
    rows = healthy_rows(0)
    for row in rows:
        if "health/gw_ratio/model.layers.3" in row:
            row["health/gw_ratio/model.layers.3"] *= 80
    (finding,) = pathologies_of(write(tmp_path / "run", rows))
    assert finding.check == "run.layer_imbalance"
    assert finding.severity == "info"


def test_a_folder_that_is_gone_costs_only_what_needs_its_rows(tmp_path: Path) -> None:
    """A Run may be made from something else than a folder."""
    run = lr_too_high(tmp_path / "run", 0, True)
    shutil.rmtree(tmp_path / "run")
    assert found(run) == ["run.lr_too_high"]


@pytest.mark.parametrize(
    ("after", "severity"), [([2.0] * 40, "warning"), ([2.0] * 3, "critical"), ([0.0] * 40, "critical")]
)
def test_one_batch_that_was_not_finite_has_not_ended_the_run(after: list[float], severity: str) -> None:
    """A finite loss proves that the weights are whole; a zero stands for NaN and proves nothing."""
    noise = np.random.default_rng(0).normal(0, 0.02, 43)
    losses = [*(2.0 + noise), float("nan"), *(np.array(after) + noise[: len(after)] * (np.array(after) > 0))]
    by_check = {one.check: one for one in pathologies_of(made(losses))}
    finding = by_check["run.nonfinite"]
    assert (finding.severity, finding.since, finding.evidence["rows"]) == (severity, 44, 1)
    assert ("finite again since step 45" in finding.message) == (severity == "warning")
    assert ("resume_from" in finding.fix) == (severity == "critical")
