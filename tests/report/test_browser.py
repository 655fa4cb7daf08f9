"""The page in a real Chromium: quiet, closed, right, and usable narrow, dark and without script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import MAKERS

DEAD = "model.layers.2.mlp.up_proj"
PHONE = {"width": 360, "height": 740}


@pytest.fixture
def visit(browser: Any, folder_of: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """Opens the page of a run; at the end, nothing may have been complained about or fetched."""
    complaints: list[str] = []
    fetched: list[str] = []
    contexts = []

    def refuse(dialog: Any) -> None:
        complaints.append(dialog.message)
        dialog.dismiss()

    def open_page(name: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", refuse)
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((folder_of(name) / "report.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in fetched if url.startswith("file:")]) == len(contexts)


@pytest.mark.parametrize("name", MAKERS)
def test_no_complaint_and_no_sideways_scrolling_on_a_phone(name: str, visit: Callable[..., Any]) -> None:
    page = visit(name, viewport=PHONE)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("document.body.scrollWidth") <= PHONE["width"]


def test_it_shows_the_verdict_and_the_broken_layer(visit: Callable[..., Any]) -> None:
    page = visit("faulty")
    assert page.inner_text(".verdict .word") == "CRITICAL"
    first = page.inner_text(".moments li:first-child")
    assert "step 310" in first
    assert f"{DEAD} has had no gradient since step 310" in first
    assert page.inner_text(".curves figure:first-child h3") == DEAD
    assert page.locator(".row-names .wide.alarmed").filter(has_text=DEAD).is_visible()
    assert page.locator("image.cells.on-light").first.bounding_box()["width"] > 400


def test_names_are_text(visit: Callable[..., Any]) -> None:
    page = visit("nasty")
    assert page.evaluate("window.pwned") is None
    assert page.locator("h1").inner_text() == "<script>window.pwned=1;alert(1)</script>"
    assert page.evaluate("document.scripts.length") == 1
    assert page.locator("img").count() == 0


def test_the_policy_stops_what_is_not_ours(
    browser: Any, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = (folder_of("healthy") / "report.html").read_text(encoding="utf-8")
    bad = (
        "<script>window.pwned=1</script><img src=x onerror='window.pwned=2'>"
        "<p style='color:red' id=styled>x</p>"
    )
    copy = tmp_path / "bad.html"
    copy.write_text(source.replace("<footer>", bad + "<footer>"), encoding="utf-8")
    page = browser.new_page()
    page.goto(copy.as_uri())
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    colour = page.evaluate("getComputedStyle(document.getElementById('styled')).color")
    assert colour != "rgb(255, 0, 0)"
    page.close()


def test_one_value_that_is_not_finite_can_be_seen(visit: Callable[..., Any]) -> None:
    page = visit("one_bad_loss")
    (strip,) = page.locator("svg[aria-labelledby^=timeline] .strip.nonfinite").all()
    assert strip.bounding_box()["width"] >= 1
    assert strip.locator("title").text_content() == "loss not finite: step 100, 1 value"


def test_dark_mode(visit: Callable[..., Any]) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        page = visit("faulty", color_scheme=scheme)
        colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert page.locator(f"image.cells.on-{scheme}").first.is_visible()
    assert colours == {"light": "rgb(250, 250, 247)", "dark": "rgb(20, 22, 26)"}


CONTRAST = """() => {
  const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (c !== 'rgba(0, 0, 0, 0)') return c; } return 'rgb(255, 255, 255)'; };
  const bad = [];
  for (const e of document.querySelectorAll('main *, header *, footer *')) {
    const said = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!said || !e.getClientRects().length) continue;
    const svg = e.closest('svg');
    if (e.tagName === 'title' || e.tagName === 'desc') continue;
    const own = svg ? getComputedStyle(e).fill : getComputedStyle(e).color;
    const [a, b] = [light(own), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) bad.push([e.tagName, e.getAttribute('class'), e.textContent.slice(0, 30), ratio]);
  }
  return bad;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["faulty", "healthy", "killed", "warming_up", "not_monitored"])
def test_every_text_has_enough_contrast(name: str, scheme: str, visit: Callable[..., Any]) -> None:
    assert visit(name, color_scheme=scheme).evaluate(CONTRAST) == []


def test_the_table_of_events_is_filtered_from_the_keyboard(visit: Callable[..., Any]) -> None:
    page = visit("faulty")
    visible = "document.querySelectorAll('#event-table tbody tr:not([hidden])').length"
    assert page.evaluate(visible) == 19
    page.focus("#filter-text")
    page.keyboard.type("LM_HEAD")
    assert page.evaluate(visible) == 2
    assert page.inner_text("#filter-count") == "2 of 19 shown"
    page.keyboard.press("Tab")
    page.keyboard.type("critical")
    assert page.evaluate(visible) == 0


def test_every_stop_of_the_keyboard_is_visible(visit: Callable[..., Any]) -> None:
    page = visit("faulty")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    stops = set()
    while True:
        page.keyboard.press("Tab")
        if (stop := page.evaluate("document.activeElement.tagName")) == "BODY":
            break
        stops.add(stop)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert {"A", "SUMMARY", "INPUT", "SELECT", "DIV"} <= stops


def test_it_reads_without_script_and_to_a_screen_reader(visit: Callable[..., Any]) -> None:
    page = visit("faulty", java_script_enabled=False)
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("main").count() == page.get_by_role("navigation").count() == 1
    assert page.get_by_role("img", name="Loss and events over the steps of the run").count() == 1
    assert page.get_by_role("img", name=f"Gradient norm of {DEAD}").count() == 1
    assert page.get_by_role("table", name="Events in the order of the record").is_visible()
    assert page.locator("#filter").is_hidden()


def test_marks_stay_inside_the_page(visit: Callable[..., Any]) -> None:
    for name in ("faulty", "resumed", "one_layer", "nasty"):
        page = visit(name, viewport=PHONE)
        outside = page.evaluate(
            "[...document.querySelectorAll('svg text')].filter((t) => t.getClientRects().length)"
            ".map((t) => [t.getBoundingClientRect(), t.textContent])"
            ".filter(([box]) => box.left < 0 || box.right > innerWidth).map(([_, text]) => text)"
        )
        assert outside == []
