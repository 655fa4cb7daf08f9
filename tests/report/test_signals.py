"""Charts of signals: everything recorded is on the page, and a curve is where its numbers are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report import runs
from tests.runlogs.made import made

from palingenesis.config import MonitorConfig
from palingenesis.findings.finding import Finding
from palingenesis.record.reader import load_run
from palingenesis.record.spikes import MicroBatch, Sample, Spike, write_spike
from palingenesis.report import write_html
from palingenesis.report.batches import spikes_of
from palingenesis.report.chart import HEIGHT, draw_panel
from palingenesis.report.conclusions import anchor_of, conclusions
from palingenesis.report.layer_panels import layer_panels
from palingenesis.report.panel import Bound, Line, Panel
from palingenesis.report.panels import batch_in_sequences, others_of, panels_of
from palingenesis.report.series import Signals
from palingenesis.report.spending import spending_of
from palingenesis.report.svg import UNITS
from palingenesis.report.thin import medians
from palingenesis.runlogs.table import Column

CONFIG = MonitorConfig()


def signals(**columns: Any) -> Signals:
    return Signals.of_log(made(np.linspace(3, 2, 50), **columns))


def column(values: Any) -> Column:
    numbers = np.asarray(values, dtype=np.float64)
    return Column(np.arange(len(numbers)), np.arange(1.0, len(numbers) + 1), numbers)


def points(drawing: str, label: str) -> np.ndarray:
    """Points of a curve, from its path."""
    (path,) = re.findall(rf'<path d="([^"]*)"[^>]*data-label="{label}"', drawing)
    return np.array([[float(n) for n in point.split()] for point in re.split("[ML]", path) if point])


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0, 3.0], [1e-3, 1.0, 1e3, 10.0]])
def test_a_curve_is_where_its_numbers_are(values: list[float]) -> None:
    """The places in the drawing, turned back by the axis the page gives its script, are the numbers."""
    chart = draw_panel(Panel("k", "T", "", (Line("x", column(values), "one"),)), 1, 4)
    (axis,) = re.findall(r'data-low="([^"]*)" data-high="([^"]*)"(?: data-log="(log)")?', chart.picture)
    low, high = float(axis[0]), float(axis[1])
    where = points(str(chart.picture), "x")
    back = low + (1 - where[:, 1] / HEIGHT) * (high - low)
    assert np.allclose(where[:, 0] / UNITS * 3 + 1, [1, 2, 3, 4], atol=0.01)
    assert np.allclose(10**back if axis[2] else back, values, rtol=0.02)
    assert bool(axis[2]) == (max(values) / min(values) > 30)


def test_a_cosine_is_never_on_a_logarithmic_axis() -> None:
    found = signals(**{"health/grad_cosine_sim": np.geomspace(1e-4, 0.9, 50)})
    (panel,) = [panel for panel in panels_of(found, CONFIG) if panel.key == "cosine"]
    assert "data-log" not in draw_panel(panel, 1, 50).picture


def test_values_that_are_not_finite_have_a_strip_and_no_place_in_the_curve() -> None:
    values = np.array([1.0, 2.0, np.nan, 2.0, np.inf, 1.0])
    chart = draw_panel(Panel("k", "T", "", (Line("x", column(values), "one"),)), 1, 6)
    assert ("nonfinite", "not finite") in chart.legend
    assert str(chart.picture).count('class="strip nonfinite"') == 2
    assert "nan" not in re.sub("<title>.*?</title>|<desc.*?</desc>", "", str(chart.picture))


def test_levels_out_of_reach_are_told_and_not_drawn() -> None:
    lines = (Line("x", column([1.0, 1.1, 1.2]), "one"),)
    chart = draw_panel(Panel("k", "T", "", lines, (Bound(50.0, "ceiling"),)), 1, 3)
    assert "The level of 50 (ceiling) lies outside the axis." in chart.notes
    assert "bound" not in str(chart.picture)
    held = draw_panel(Panel("k", "T", "", lines, (Bound(50.0, "batch", always=True),)), 1, 3)
    assert 'class="bound"' in str(held.picture)


def test_every_number_of_a_record_is_on_the_page_once(tmp_path: Path) -> None:
    folder = runs.healthy(tmp_path / "run")
    rng = np.random.default_rng(0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    extra = [
        "eval/loss", "eval/code/loss", "eval/gap", "train/lr/head", "train/grad_norm", "train/grad_norm_raw",
        "health/grad_cosine_sim", "health/output_entropy", "train/tokens_per_sec", "train/step_time_s",
        "health/weight_drift/a.b", "health/stable_rank/a.b", "health/some_new_one/a.b", "other/thing",
        "health/host_rss_gb", "health/update_lost_pct", "train/mfu", "health/token_efficiency",
    ]  # fmt: skip
    for row in rows[::10]:
        row.update({name: float(value) for name, value in zip(extra, rng.uniform(0.1, 1, 30), strict=False)})
        row["other/constant"] = 7
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(folder)
    found = Signals.of_run(run)
    panels = panels_of(found, CONFIG)
    families = [one.panel for one in layer_panels(found, CONFIG, 100)]
    claimed = {name for panel in (*panels, *families) for name in panel.claims}
    others = others_of(found, claimed, 100)
    assert [panel.title for panel in others.panels] == ["other/thing"]
    assert others.constant == [("other/constant", 7.0)]
    drawn = {
        id(line.column): line.label for panel in (*panels, *families, *others.panels) for line in panel.lines
    }
    for name in (*extra, "train/loss", "train/lr"):
        assert id(found[name]) in drawn, name
    page = write_html(run).read_text(encoding="utf-8")
    for panel in (*panels, *families, *others.panels):
        assert f'id="chart-{panel.key}"' in page


def test_columns_of_a_record_are_what_its_rows_say(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("one_bad_loss")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = Signals.of_run(load_run(folder))["train/loss"]
    assert loss.step.tolist() == [row["train/global_step"] for row in rows]
    assert np.flatnonzero(np.isnan(loss.value)).tolist() == [
        place for place, row in enumerate(rows) if row["train/loss"] == "NaN"
    ]


def test_the_range_of_many_layers_keeps_its_extremes() -> None:
    rng = np.random.default_rng(0)
    table = rng.uniform(1, 2, (40, 1000))
    table[7, 501], table[9, 502] = 30.0, 0.01
    names = {f"health/stable_rank/l{n}": row for n, row in enumerate(table)}
    found = Signals.of_log(made(np.zeros(1000), **names))
    (one,) = layer_panels(found, CONFIG, 1000)
    spread = one.panel.spread
    assert spread is not None
    assert len(spread.step) <= 160
    assert (spread.high.max(), spread.low.min()) == (30.0, 0.01)
    last = np.argsort(table[:, -1])[:5]
    assert [line.label for line in one.panel.lines] == [f"l{n}" for n in last]
    row = next(row for row in one.rows.rows if row.name == "l7")
    assert row.highest == "30 at step 502"


def test_medians_of_parts() -> None:
    x, y = np.arange(11.0), np.arange(11.0) ** 2
    step, value = medians(x, y, 4)
    assert step.tolist() == [1, 4, 7, 9.5]
    assert value.tolist() == [1, 16, 49, 90.5]


def test_the_batch_is_worked_out_from_the_noise_scale() -> None:
    scale = np.linspace(20, 60, 50)
    found = signals(**{"health/gns": scale, "health/gns_ratio": scale / 16})
    assert np.allclose(batch_in_sequences(found).value, 16)
    (panel,) = [panel for panel in panels_of(found, CONFIG) if panel.key == "noise"]
    assert [bound.value for bound in panel.bounds] == [pytest.approx(16)]
    ratio = signals(**{"health/gns_ratio": scale / 16})
    (panel,) = [panel for panel in panels_of(ratio, CONFIG) if panel.key == "noise"]
    assert [bound.value for bound in panel.bounds] == [1.0]


def test_where_the_time_went() -> None:
    """Ten rows of five steps at 2 s, two evaluations of 10 s, a minute of which nothing is known."""
    step = np.arange(5.0, 55.0, 5.0)
    evaluation = np.full(10, np.nan)
    evaluation[[4, 9]] = 10.0
    found = Signals.of_log(made(np.ones(10), step=step, step_time_s=np.full(10, 2.0), eval_s=evaluation))
    info = {"start": "2026-01-01T00:00:00+00:00", "end": {"time": "2026-01-01T00:03:00+00:00"}}
    spent = spending_of(found, info)
    assert spent is not None
    assert {part.label: part.seconds for part in spent.parts} == {
        "training": 100.0,
        "evaluation": 20.0,
        "everything else": 60.0,
    }
    assert sum(part.share for part in spent.parts) == pytest.approx(1)
    assert spending_of(Signals.of_log(made([1.0])), {}) is None


# -- findings and spikes -------------------------------------------------------------------------------------


def test_findings_lead_the_page_and_point_to_charts(folder_of: Callable[[str], Path], browser: Any) -> None:
    finding = Finding(
        "run.lr_too_high", "critical", "the loss rose <b>", {"steps": [3]}, "train.learning_rate: 1e-4",
        since=3, confidence=0.8, otherwise=("bad data",), next="halve it",
    )  # fmt: skip
    (one,) = conclusions([finding], [("lr", "Learning rate")])
    assert (one.since, one.confidence, one.otherwise) == ("3", "80%", ("bad data",))
    assert one.charts == (("chart-lr", "Learning rate"),)
    page = browser.new_page()
    page.goto((folder_of("faulty") / "report.html").as_uri())
    headings = page.locator("main h2").all_text_contents()
    assert headings.index("Findings") == 1
    first = page.locator("article.finding").first
    assert first.locator("dt", has_text="Evidence").count() == 1
    assert page.locator("svg.chart a").count() > 0
    page.locator("svg.chart a").first.dispatch_event("click")
    assert page.evaluate("document.querySelector(':target') !== null")
    page.close()


def test_marks_of_a_chart_lead_to_rows_that_exist(page_of: Callable[[str], str]) -> None:
    page = page_of("faulty")
    links = set(re.findall(r'href="#(event-\d+|finding-[a-z-]+)"', page))
    assert links
    assert links <= set(re.findall(r'id="([^"]+)"', page))
    assert anchor_of("run.lr_too_high") == "finding-run-lr-too-high"


def test_what_was_in_the_batch_is_on_the_page(tmp_path: Path) -> None:
    folder = runs.healthy(tmp_path / "run")
    sample = Sample(source="code", row=17, tokens=12, loss_tokens=5, text="</td><script>x</script>")
    other = Sample(index=4, first_tokens=(1, 2, 3))
    for step in (100, 200):
        write_spike(
            folder,
            Spike(
                step, "loss_spike", loss=9.5, baseline=2.0, microbatches=(MicroBatch((sample, other), 9.0),)
            ),
        )
    run = load_run(folder)
    page = write_html(run).read_text(encoding="utf-8")
    assert "What was in the batch" in page
    assert "code row 17" in page
    assert "&lt;/td&gt;&lt;script&gt;x&lt;/script&gt;" in page
    assert "first tokens 1 2 3" in page
    shown = spikes_of([Spike(1, "loss_spike", microbatches=(MicroBatch((sample,)),)) for _ in range(60)])
    assert (len(shown.shown), shown.left_out) == (40, 20)
    assert "code row 17 (2 spikes)" in page
