"""An inspection as one page that needs nothing else: masks at a glance, light or dark, without script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from palingenesis.errors import ConfigError
from palingenesis.preflight.inspect import Inspection, Shown
from palingenesis.preflight.inspect_text import UNICODE, edges_of, visible
from palingenesis.preflight.tokens import Token, runs_of
from palingenesis.preflight.words import counted

#: Tokens of a page that get a table; beyond it pages become too slow to open.
_LARGEST_TABLE = 20_000


def write_page(found: Inspection, path: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(render_page(found))
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written to {path}: {error.strerror or error}; give a path you may write to"
        ) from None


def render_page(found: Inspection) -> bytes:
    """The page."""
    style = _asset("inspect.css")
    html = _template().render(
        style=Markup(style),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'",
        model=visible(found.model),
        method=found.method,
        packed=found.packed,
        samples=[_sample(shown) for shown in found.shown],
        refused=[visible(f"{each.file} line {each.line}: {each.problem.reason}") for each in found.refused],
    )
    return html.encode("utf-8")


def _sample(shown: Shown) -> dict[str, Any]:
    count, loss = len(shown.tokens), shown.loss_tokens
    return {
        "title": visible(shown.title),
        "where": visible("; ".join(shown.places)),
        "count": count,
        "loss": loss,
        "share": f"{loss / count:.0%}" if count else "0%",
        "truncated": shown.truncated,
        "bars": list(_bars(shown)),
        "text": Markup("").join(_text(shown)),
        "rows": [_row(token) for token in shown.tokens[:_LARGEST_TABLE]],
    }


def _bars(shown: Shown) -> Iterator[dict[str, Any]]:
    """The strip above a sample: a bar for each run of tokens, a line where a document begins."""
    start, document = 0, 1
    for run in runs_of(shown.tokens):
        kind = "loss" if run[0].loss else "masked"
        title = f"{counted(len(run), 'token')} with{'' if run[0].loss else 'out'} loss"
        yield {"kind": kind, "start": start, "width": len(run), "title": title}
        if run[0].document != document:
            document = run[0].document
            width = max(len(shown.tokens) / 400, 0.5)
            yield {"kind": "border", "start": start, "width": width, "title": f"document {document}"}
        start += len(run)


def _text(shown: Shown) -> Iterator[Markup]:
    document = 1
    for run in runs_of(shown.tokens):
        if run[0].document != document:
            document = run[0].document
            yield Markup("<hr>")
        loss = run[0].loss
        yield Markup("<mark>") if loss else Markup("")
        for at, token in enumerate(run):
            yield _token(token, edges_of(run, at))
        yield Markup("</mark>") if loss else Markup("")


def _token(token: Token, edges: tuple[bool, bool]) -> Markup:
    if not token.text:
        return Markup("")
    text = escape(visible(token.text, UNICODE, edges=edges, lines=True))
    for mark in (UNICODE.newline, UNICODE.tab, UNICODE.space):
        text = text.replace(mark, Markup("<i>{}</i>").format(mark))
    if token.special:
        text = Markup("<b>{}</b>").format(text)
    if token.note:
        text = Markup("<u>{}</u>").format(text)
    turn = f"message {token.turn}, {token.role}" if token.turn else token.role
    told = f"position {token.position}, id {token.id}, {turn}{', ' if token.note else ''}{token.note}"
    return Markup('<span title="{}">{}</span>').format(told, text)


def _row(token: Token) -> dict[str, Any]:
    shown = visible(token.text, edges=(True, True)) if token.text else f"<{visible(token.piece)}>"
    return {
        "position": token.position,
        "token": shown,
        "id": token.id,
        "turn": f"{token.turn} {token.role}" if token.turn else token.role,
        "loss": token.loss,
        "document": token.document,
        "position_id": token.position_id,
        "note": token.note,
    }


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("palingenesis.preflight", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("inspect.html")


@cache
def _asset(name: str) -> str:
    folder = resources.files("palingenesis.preflight") / "templates"
    # The hash is of the text as a browser reads it, whatever the line ends of a checkout.
    return (folder / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
