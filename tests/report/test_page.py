"""The page's source: it is whole, closed, small enough, and says what was left out."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.report import runs
from tests.report.conftest import SMALL

from palingenesis.errors import RecordError
from palingenesis.record.reader import Run, load_run
from palingenesis.report import html, write_html

VOID = {"meta", "link", "input", "br", "img"}


class Outline(HTMLParser):
    """Tags that match, ids, headings and links of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", SMALL)
def test_the_page_is_whole(name: str, page_of: Callable[[str], str]) -> None:
    page = page_of(name)
    outline = Outline(page)
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    steps = [after - before for before, after in zip(outline.headings, outline.headings[1:], strict=False)]
    assert max(steps) <= 1
    named = [v for n, v in outline.attributes if n in ("aria-labelledby", "href") and v and v.startswith("#")]
    assert {v[1:] for v in named if v} <= set(outline.ids)
    labels = [w for n, v in outline.attributes if n == "aria-labelledby" for w in (v or "").split()]
    assert set(labels) <= set(outline.ids)


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_fetched_and_only_our_own_style_and_script_may_run(
    name: str, page_of: Callable[[str], str]
) -> None:
    page = page_of(name)
    outline = Outline(page)
    assert outline.tags.count("script") == outline.tags.count("style") == 1
    links = [v or "" for n, v in outline.attributes if n in ("src", "href", "action", "xlink:href")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not [n for n, _ in outline.attributes if n.startswith("on") or n == "style"]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    rules = policy.group(1).replace("&#39;", "'")
    assert rules.startswith("default-src 'none'; ")
    for tag in ("style", "script"):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert text is not None
        digest = base64.b64encode(hashlib.sha256(text.group(1).encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in rules
    assert "unsafe" not in rules


def test_names_are_shown_and_not_run(page_of: Callable[[str], str]) -> None:
    page = page_of("nasty")
    assert "<script>window.pwned" not in page
    assert "<img" not in page
    assert "&lt;script&gt;window.pwned=1;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "\\x1b[31mred" in page
    assert "{{ 7*7 }}" in page
    assert "x" * 300 in page


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("healthy", "HEALTHY"),
        ("faulty", "CRITICAL"),
        ("nasty", "PARTLY MONITORED"),
        ("killed", "INTERRUPTED"),
        ("resumed", "CRITICAL"),
        ("warming_up", "UNKNOWN"),
        ("bare", "UNKNOWN"),
        ("one_layer", "WARNING"),
        ("all_nan", "CRITICAL"),
        ("not_monitored", "NOT MONITORED"),
        ("one_bad_loss", "CRITICAL"),
        ("accepted", "WARNING"),
    ],
)
def test_the_verdict_is_on_top(name: str, verdict: str, page_of: Callable[[str], str]) -> None:
    assert f'<span class="word">{verdict}</span>' in page_of(name)


def test_what_cannot_be_drawn_is_said(page_of: Callable[[str], str]) -> None:
    assert "No loss was recorded." in page_of("bare")
    assert "Every recorded loss was non-finite." in page_of("all_nan")
    assert "loss not finite: steps 521 to 541, 21 values" in page_of("faulty")
    assert "1 loss value lies beyond the axis" in page_of("one_layer")
    assert "Still warming up" in page_of("warming_up")
    assert "the process was killed, or it is still running" in page_of("killed")
    assert "never passed to the monitor" in page_of("bare")
    assert "gradient norms of model.experts cannot be read" in page_of("faulty")
    assert "(this step was run again after a resume)" in page_of("resumed")
    assert "<code>fc</code>: gradient norm 30 at step 55, between two checks." in page_of("one_bad_loss")
    assert "12,000,201" in page_of("one_layer")


def test_an_accepted_level_is_not_shown_as_one_that_came_back(page_of: Callable[[str], str]) -> None:
    page = page_of("accepted")
    assert "0 not cleared, 1 accepted" in page
    assert page.count('class="flag accepted"') == 2  # one in the key
    assert page.count('class="flag clear"') == 2
    assert page.count('class="accepted"') == 1  # on the timeline
    assert '<span class="swatch accepted"' in page
    assert page.count('class="frame accepted"') == 1
    assert "exploding from step 210, alarm at step 220, new level accepted at step 4" in page
    assert "<td>exploding (accepted)</td>" in page
    assert "and the new level was accepted at step 4" in page
    before_curves = page_of("faulty").split("</style>")[1].split('<section aria-labelledby="curves">')[0]
    assert "accepted" not in before_curves


def test_the_timeline_names_the_layer_of_an_incident_to_look_at_first(page_of: Callable[[str], str]) -> None:
    page = page_of("faulty")
    timeline = page.split('<section aria-labelledby="timeline">')[1].split("</section>")[0]
    assert "look first at model.layers.2.mlp.up_proj and 4 more</text>" in timeline
    assert "Incident; look first at model.layers.2.mlp.up_proj: no gradient from step 310" in timeline
    assert "model.layers.1" not in timeline
    assert "Look first at <code>model.layers.2.mlp.up_proj</code>: " in page
    assert "likely origin" not in page


def test_what_was_so_from_the_start_and_what_came_too_late(page_of: Callable[[str], str]) -> None:
    page = page_of("accepted")
    answers = dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", page))
    assert answers["Parameters that train but are in no optimizer"] == (
        ", ".join(f"model.layers.{n}.norm.weight" for n in range(6)) + " and 2 more"
    )
    assert answers["Out of range at the last check, with no second one to confirm it"] == (
        "lm_head (vanishing), model.embed_tokens (exploding)"
    )
    first, *_, last = re.findall(r'<li class="warning">.*?</li>', page, re.DOTALL)
    assert "step 0" in first
    assert "No optimizer holds 8 parameters." in first
    assert "the run ended before a second check could confirm it" in last
    assert '<td role="cell"><code>lm_head</code></td>' in page
    assert "lm_head, unconfirmed</text>" in page
    assert "not optimized</text>" in page
    assert not re.findall(r'x="-[\d.]+%"', page)
    faulty = dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", page_of("faulty")))
    assert faulty["Parameters that train but are in no optimizer"] == "none"


def test_a_page_without_its_events_says_so(tmp_path: Path) -> None:
    run = runs.faulty(tmp_path / "run")
    (run / "events.jsonl").unlink()
    page = write_html(load_run(run)).read_text(encoding="utf-8")
    assert '<span class="word">CRITICAL</span>' in page  # the losses show it
    assert "What the monitor said of it: UNKNOWN: " in page
    assert "19 of 19 events are missing from the record: run `pgs verify` on it" in page
    assert "Run pgs verify on the folder" in page
    assert "Train longer" not in page
    assert "The record is not as it was written:</strong> events.jsonl is missing" in page


def test_the_page_says_what_of_the_record_was_checked(page_of: Callable[[str], str]) -> None:
    told = r"The record is intact: \d+ events, each as it was written \(metrics and layers are not covered: "
    assert re.search(told + "the end of the run holds no digest of them", page_of("healthy"))
    assert "(metrics and layers are not covered: the run has no end)" in page_of("killed")


def test_a_healthy_run_without_a_loss_claims_nothing_of_it(tmp_path: Path) -> None:
    run = load_run(runs.write_run(tmp_path / "run", runs.Script(["fc"], runs.healthy_norms(20, 1))))
    assert run.verdict == "HEALTHY"
    page = write_html(run).read_text(encoding="utf-8")
    assert "No loss was passed to the monitor, so nothing is known of it." in page
    assert "the loss" not in run.verdict_sentence


def test_a_thousand_layers_and_two_thousand_checks(
    folder_of: Callable[[str], Path], page_of: Callable[[str], str]
) -> None:
    page = page_of("big")
    assert (folder_of("big") / "report.html").stat().st_size < 2_000_000
    assert "2,000 checks are drawn in 720 columns of up to 3 checks." in page
    assert "Curves of 24 of 80 alarmed layers are drawn" in page
    assert "The loss curve shows the lowest and the highest" in page
    Outline(page)


def test_a_page_that_would_be_too_large_shows_less_and_says_so(tmp_path: Path) -> None:
    names = [f"<&\"'>{n:04}" + "&" * 295 for n in range(1200)]
    norms = runs.healthy_norms(30, len(names))
    norms[15:, ::3] = 0.0
    run = load_run(runs.write_run(tmp_path / "run", runs.Script(names, norms)))
    page = html.render_html(run)
    assert len(page) < html.LARGEST_PAGE
    assert re.search(rb"[\d,]+ of 1,200 layers are shown", page)
    assert re.search(rb"1,200 layers are drawn in [\d,]+ rows", page)


def test_a_record_that_was_altered_is_said_to_be(tmp_path: Path) -> None:
    run = runs.faulty(tmp_path / "run")
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace("exploding", "vanishing"))
    page = write_html(load_run(run)).read_text(encoding="utf-8")
    assert "The record is not as it was written:" in page
    assert "was altered" in page


def test_a_run_whose_description_is_gone_still_has_a_page(tmp_path: Path) -> None:
    run = runs.faulty(tmp_path / "run")
    (run / "run.json").unlink()
    page = write_html(load_run(run)).read_text(encoding="utf-8")
    assert "model.layers.2.mlp.up_proj" in page
    assert "run.json is missing" in page


def test_an_option_of_a_later_version_is_shown(tmp_path: Path) -> None:
    script = runs.Script(["fc"], runs.healthy_norms(12, 1), info={"config": {"warmup": 4, "telepathy": True}})
    page = write_html(load_run(runs.write_run(tmp_path / "run", script))).read_text(encoding="utf-8")
    assert "telepathy" in page
    assert "not known to this version" in page


def test_the_page_appears_whole_or_not_at_all(tmp_path: Path, run_of: Callable[[str], Run]) -> None:
    target = tmp_path / "elsewhere.html"
    assert write_html(run_of("healthy"), target) == target
    assert os.listdir(tmp_path) == ["elsewhere.html"]
    before = target.read_bytes()
    write_html(run_of("healthy"), str(target))
    assert target.read_bytes() == before
    with pytest.raises(RecordError, match=r"cannot be written .*; give a path you may write to"):
        write_html(run_of("healthy"), tmp_path / "nowhere" / "page.html")
