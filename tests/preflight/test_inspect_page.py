"""The page of ``pgs inspect`` in a real Chromium: masks at a glance, closed, narrow, dark, without script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cases.build import rows
from tests.preflight.conftest import MODEL, conversation

from palingenesis.errors import ConfigError
from palingenesis.preflight.inspect import inspect
from palingenesis.preflight.inspect_page import write_page
from palingenesis.preflight.target import target_of

PHONE = {"width": 360, "height": 740}
NASTY = "<script>window.pwned=1</script><img src=x onerror='window.pwned=2'> & \"quoted\""


@pytest.fixture
def pages(tmp_path: Path, write: Callable[..., Path]) -> dict[str, Path]:
    """A page of a few odd rows, and one of packed rows."""
    odd = write(
        conversation(NASTY, f"Answer:\t{NASTY}\n\n東京 🙂"), conversation("Hi", "x" * 400), conversation("?")
    )
    found = inspect(target_of(None, (), MODEL, str(odd)))
    write_page(found, tmp_path / "odd.html")
    options = [("data.packing", "true"), ("data.max_seq_length", "128")]
    packed = inspect(target_of(None, options, MODEL, str(write(*rows(12), name="many.jsonl"))))
    write_page(packed, tmp_path / "packed.html")
    return {"odd": tmp_path / "odd.html", "packed": tmp_path / "packed.html"}


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end, nothing may have been complained about or fetched."""
    complaints: list[str] = []
    fetched: list[str] = []
    contexts = []

    def open_page(name: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(pages[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert len(fetched) == len(contexts)


def background(page: Any, selector: str) -> str:
    return str(page.eval_on_selector(selector, "each => getComputedStyle(each).backgroundColor"))


def luminance(colour: str) -> float:
    red, green, blue = (int(part) for part in colour[4:-1].split(","))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_marked_text_is_the_answer(visit: Callable[..., Any]) -> None:
    page = visit("odd")
    assert page.locator("#sample-1 mark").inner_text().replace("↵", "").startswith("Answer:")
    assert "window.pwned=1" in page.locator("#sample-1 mark").inner_text()
    assert "assistant" not in page.locator("#sample-1 mark").inner_text()
    assert page.locator("#sample-1 mark").inner_text().endswith("<|end|>")
    assert page.locator(".refused li").count() == 1


def test_text_is_text(visit: Callable[..., Any]) -> None:
    page = visit("odd")
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.scripts.length") == 0
    assert page.locator("img").count() == 0


def test_the_strip_shows_where_loss_is(visit: Callable[..., Any]) -> None:
    page = visit("odd")
    bars = page.locator("#sample-2 .strip rect")
    kinds = [bars.nth(at).get_attribute("class") for at in range(bars.count())]
    assert kinds == ["masked", "loss", "masked"]
    widths = [bars.nth(at).bounding_box()["width"] for at in range(bars.count())]
    assert widths[1] > 3 * (widths[0] + widths[2])
    assert background(page, ".text mark") != background(page, "body")


def test_the_table_has_every_token(visit: Callable[..., Any]) -> None:
    page = visit("packed")
    page.locator("#sample-1 summary").click()
    count = page.locator("#sample-1 tbody tr").count()
    heading = page.locator("#sample-1 h2").inner_text()
    assert f"of {count} tokens bear loss" in heading
    assert page.locator("#sample-1 tbody tr.loss").count() == int(heading.split(": ")[1].split()[0])
    assert page.locator("#sample-1 thead").inner_text().count("position id") == 1
    assert page.locator("#sample-1 .text hr").count() >= 1


@pytest.mark.parametrize("name", ["odd", "packed"])
def test_no_sideways_scrolling_on_a_phone(name: str, visit: Callable[..., Any]) -> None:
    page = visit(name, viewport=PHONE)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_it_is_dark_where_the_reader_wants_it(visit: Callable[..., Any]) -> None:
    light, dark = visit("odd", color_scheme="light"), visit("odd", color_scheme="dark")
    assert luminance(background(light, "body")) > 200
    assert luminance(background(dark, "body")) < 60
    for page in (light, dark):
        ink = page.eval_on_selector(".text mark", "each => getComputedStyle(each).color")
        paper = background(page, ".text mark")
        assert abs(luminance(ink) - luminance(paper)) > 90


def test_it_is_read_without_script(visit: Callable[..., Any]) -> None:
    page = visit("odd", java_script_enabled=False)
    assert page.locator("#sample-1 mark").is_visible()


def test_a_place_that_cannot_be_written(tmp_path: Path, write: Callable[..., Path]) -> None:
    found = inspect(target_of(None, (), MODEL, str(write(conversation("Hi", "Hello.")))))
    with pytest.raises(ConfigError, match="the page cannot be written to"):
        write_page(found, tmp_path / "nowhere" / "page.html")
