"""What every page is made with: template, style and script, the policy that allows only these, the file.

Style and script are part of the file, and the content policy allows exactly these two by their hashes, so
that whatever a name of a layer or a line of a log says, nothing else can run, load or be sent.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from palingenesis.errors import RecordError
from palingenesis.report.words import Name, step_number, visible

_READABLE_FILE = 0o644


def rendered(template: str, **values: object) -> bytes:
    """A page from its template, with style, script and policy."""
    style, script = _asset("report.css"), _asset("report.js")
    html = _template(template).render(
        style=Markup(style), script=Markup(script), policy=_policy(style, script), **values
    )
    return html.encode("utf-8")


def write_page(target: Path, page: bytes) -> Path:
    """Write a page, whole or not at all, and return where it is.

    Raises:
        RecordError: the file cannot be written.
    """
    try:
        _write_whole(target, page)
    except OSError as error:
        raise RecordError(
            f"the report cannot be written to {target}: {error.strerror or error}; "
            "give a path you may write to"
        ) from None
    return target


@cache
def _template(name: str) -> jinja2.Template:
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
    return environment.get_template(name)


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
