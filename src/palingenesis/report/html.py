"""The page: RUN/report.html, one file that needs nothing else.

The page is put together from drawings and rows; the template only places them. Its style and its small
script are part of the file, and the content policy allows exactly these two by their hashes, so that
whatever a name of a layer says, nothing else can run, load or be sent.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from palingenesis.errors import RecordError
from palingenesis.record.format import REPORT_FILE
from palingenesis.record.verify import Verification, in_words
from palingenesis.report import tables
from palingenesis.report.curves import FLAGS, describe_missing, draw_curve, order_of_layers
from palingenesis.report.facts import Facts, gather
from palingenesis.report.heatmap import draw_heatmap
from palingenesis.report.history import replay
from palingenesis.report.timeline import draw_timeline
from palingenesis.report.verdicts import advice, meaning
from palingenesis.report.words import Name, duration, moment, step_number, visible

if TYPE_CHECKING:
    from palingenesis.record.reader import Run

LARGEST_PAGE = 2_000_000
"""Bytes that a page may have."""

_NAMED_UNWATCHED = 60
_MOMENTS_TOLD = 5
_READABLE_FILE = 0o644


@dataclass(frozen=True)
class Limits:
    """How much of a run is drawn. What is left out is said on the page."""

    columns: int = 720
    rows: int = 1000
    curves: int = 24
    events: int = 600
    layers: int = 1000
    name_length: int = 320


# Tried in this order until the page is small enough; the first fits all but the largest runs.
_LIMITS = (
    Limits(),
    Limits(columns=600, rows=500, curves=16, events=400, layers=500, name_length=160),
    Limits(columns=300, rows=250, curves=8, events=200, layers=200, name_length=80),
)


def write_html(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run and return where it is.

    Args:
        run: what ``load_run`` returned.
        path: the file to write; by default ``report.html`` in the run's folder. It appears whole or not at
            all.

    Raises:
        RecordError: the file cannot be written.
    """
    target = Path(path) if path is not None else Path(run.folder) / REPORT_FILE
    page = render_html(run)
    try:
        _write_whole(target, page)
    except OSError as error:
        raise RecordError(
            f"the report cannot be written to {target}: {error.strerror or error}; "
            "give a path you may write to"
        ) from None
    return target


def render_html(run: Run) -> bytes:
    """The page of a run."""
    facts = gather(run)
    verification = run.verify()
    page = b""
    for limits in _LIMITS:
        page = _page(facts, limits, verification)
        if len(page) <= LARGEST_PAGE:
            break
    return page


def _page(facts: Facts, limits: Limits, verification: Verification) -> bytes:
    style, script = _asset("report.css"), _asset("report.js")
    html = _template().render(
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        **_head(facts, verification),
        **_drawings(facts, limits),
        events=tables.event_rows(facts, limits.events, limits.name_length),
        monitored=tables.monitored(facts),
        gaps=tables.gaps(facts),
        not_watched=tables.not_watched(facts, _NAMED_UNWATCHED),
        options=tables.option_rows(facts.info.get("config") or {}),
        config=facts.config,
    )
    return html.encode("utf-8")


def _head(facts: Facts, verification: Verification) -> dict[str, Any]:
    end = facts.end or {}
    return {
        "name": visible(facts.name, 160),
        "started": moment(facts.info["start"]) if facts.info.get("start") else None,
        "took": duration(facts.info.get("start"), end.get("time")),
        "verdict": facts.verdict,
        "tone": facts.verdict.lower().replace(" ", "-"),
        "sentence": visible(facts.sentence[:1].upper() + facts.sentence[1:]),
        "meaning": meaning(facts),
        "advice": advice(facts),
        "moments": facts.moments[:_MOMENTS_TOLD],
        "more_moments": max(0, len(facts.moments) - _MOMENTS_TOLD),
        "figures": tables.key_figures(facts),
        "about": tables.about_run(facts),
        "problem": None if verification.ok else visible(verification.problem),
        "intact": in_words(verification),
        "unreadable": [visible(p) for p in facts.problems],
    }


def _drawings(facts: Facts, limits: Limits) -> dict[str, Any]:
    start, end = _axis(facts)
    timeline = draw_timeline(facts, start, end)
    if not facts.checks or not facts.norms.names:
        return {"timeline": timeline, "heatmap": None, "curves": [], "curves_left_out": None, "layers": None}
    history = replay(facts.norms, facts.config)
    known = set(facts.norms.names)
    alarmed = [layer for layer in order_of_layers(facts.episodes, facts.moments) if layer in known]
    shown = alarmed[: limits.curves]
    return {
        "timeline": timeline,
        "heatmap": draw_heatmap(history, facts.episodes, limits.columns, limits.rows),
        "curves": [
            draw_curve(f"curve-{i}", layer, history, facts.episodes, start, end)
            for i, layer in enumerate(shown)
        ],
        "flags": FLAGS,
        "curves_left_out": describe_missing(len(shown), len(alarmed)),
        "layers": tables.layer_rows(history, facts.episodes, limits.layers, limits.name_length),
    }


def _axis(facts: Facts) -> tuple[float, float]:
    """The steps that all drawings share: from the first that the record knows of to the last."""
    firsts = [float(steps[0]) for steps in (facts.loss_steps, facts.norms.steps) if len(steps)]
    firsts += [float(event.step) for event in facts.events if event.step > 0 and not event.superseded]
    firsts += [float(moment.onset) for moment in facts.moments]
    start = max(1.0, min(firsts, default=1.0))
    return start, max(float(facts.last_step), start + 1.0)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("palingenesis.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.tests["a_name"] = lambda piece: isinstance(piece, Name)
    environment.filters["visible"] = visible
    environment.filters["step"] = step_number
    return environment.get_template("report.html")


@cache
def _asset(name: str) -> str:
    folder = resources.files("palingenesis.report") / "templates"
    # Hashes are of the text between the tags as a browser reads it, whatever the line ends of a checkout.
    return (folder / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _write_whole(target: Path, data: bytes) -> None:
    """Beside the target first, then in its place: a reader never sees half a page."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, _READABLE_FILE)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
