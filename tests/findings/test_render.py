"""What is printed: on terminals of any width, in a pipe, as JSON."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from palingenesis.findings import Finding, Report
from palingenesis.findings.catalog import CATALOG
from palingenesis.findings.render import (
    evidence_in_words,
    print_entry,
    print_findings,
    print_titles,
    shortened,
    to_json,
    visible,
)
from palingenesis.findings.schema import json_schema

LINES = list(range(3, 432, 3))
REPORT = Report(
    "validate",
    (
        Finding("tokenizer.two_bos", "info", "One sample has [bold]two[/bold] BOS.", {}, ""),
        Finding(
            "masking.no_loss_tokens",
            "warning",
            "143 of 1,200 samples (11.9%) have no loss-bearing token: /data/a-very-long-path/of/a/file.jsonl",
            {"lines": LINES, "share": 0.1191666, "truncated": True, "none": None, "empty": []},
            "data.max_seq_length: 4096",
        ),
        Finding(
            "run.nonfinite",
            "critical",
            "The loss is NaN.",
            {"value": math.nan},
            "train.learning_rate: 1e-05",
            since=3,
            confidence=0.9,
            otherwise=("one thing", "another"),
            next="run it again",
        ),
    ),
    {"share": np.float32(0.5), "counts": np.arange(3), "worst": math.inf, "by_turn": {1: 2}},
)


def shown(report: Report, **options: Any) -> str:
    out = io.StringIO()
    print_findings(report, Console(file=out, **options))
    return out.getvalue()


def terminal(report: Report, width: int, color: str | None = None) -> str:
    return shown(report, force_terminal=True, width=width, color_system=color, legacy_windows=False)


def test_a_pipe_gets_plain_lines_that_are_not_wrapped() -> None:
    assert shown(REPORT, width=40).splitlines() == [
        "CRITICAL run.nonfinite",
        "  The loss is NaN.",
        "  value NaN",
        "  confidence: 90%",
        "  or else: one thing; another",
        "  to tell: run it again",
        "  fix: train.learning_rate: 1e-05",
        "WARNING masking.no_loss_tokens",
        "  143 of 1,200 samples (11.9%) have no loss-bearing token: /data/a-very-long-path/of/a/file.jsonl",
        "  lines 3, 6, 9 and 140 more; share 0.1192; truncated yes",
        "  fix: data.max_seq_length: 4096",
        "INFO tokenizer.two_bos",
        "  One sample has [bold]two[/bold] BOS.",
        "validate: 1 critical, 1 warning, 1 info; pgs explain ID says more about one",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_gets_lines_that_fit_and_all_of_the_text(width: int) -> None:
    lines = terminal(REPORT, width).splitlines()
    assert all(len(line) <= width for line in lines)
    together = "".join(" ".join(lines).split())
    for one in REPORT.findings:
        assert "".join(one.message.split()) in together
        assert "".join(one.fix.split()) in together


def test_color_says_nothing_that_words_do_not() -> None:
    import re

    colored, plain = terminal(REPORT, 80, "truecolor"), terminal(REPORT, 80)
    assert colored != plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_nothing_found_is_said() -> None:
    assert shown(Report("validate", (), {})) == "validate: nothing found\n"


def test_samples_cannot_steer_the_terminal() -> None:
    bad = Finding("a.b", "info", "text \x1b[2J\x07\nand\u202emore\ud800", {"id": "\x1b]0;x"}, "")
    out = shown(Report("validate", (bad,)))
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
    out.encode("utf-8")
    assert len(out.splitlines()) == 4
    assert visible("Grüße, 世界") == "Grüße, 世界"


def test_long_lists_are_shortened() -> None:
    assert shortened([]) == ""
    assert shortened(map(str, range(4))) == "0, 1, 2, 3"
    assert shortened(map(str, range(5))) == "0, 1, 2 and 2 more"
    assert evidence_in_words({"layers": {f"h.{n}": n / 7 for n in range(9)}}) == (
        "layers h.0 0, h.1 0.1429, h.2 0.2857 and 6 more"
    )


# -- JSON ----------------------------------------------------------------------------------------------------


def test_json_is_strict_and_has_everything() -> None:
    document = to_json(REPORT)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["exit_code"] == 1
    assert [one["check"] for one in document["findings"]] == [
        "run.nonfinite",
        "masking.no_loss_tokens",
        "tokenizer.two_bos",
    ]
    assert document["findings"][0]["evidence"] == {"value": "NaN"}
    assert document["findings"][1]["evidence"]["lines"] == LINES
    assert document["facts"] == {"share": 0.5, "counts": [0, 1, 2], "worst": "Infinity", "by_turn": {"1": 2}}


@pytest.mark.parametrize("report", [REPORT, Report("validate", (), {})])
def test_json_is_what_the_schema_says(report: Report) -> None:
    assert problems(to_json(report), json_schema()) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("exit_code",), 2),
        (("command",), None),
        (("more",), 1),
        (("findings", 0, "severity"), "bad"),
        (("findings", 0, "check"), "no section"),
        (("findings", 0, "message"), ""),
        (("findings", 0, "evidence"), []),
        (("facts",), None),
    ],
)
def test_the_schema_refuses_anything_else(path: tuple[Any, ...], value: Any) -> None:
    document = to_json(REPORT)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert problems(document, json_schema()) != []


def test_the_schema_refuses_what_lacks_something() -> None:
    document = to_json(REPORT)
    del document["findings"][0]["fix"]
    assert problems(document, json_schema()) == ["findings[0]: fix is missing"]


_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "null": type(None),
}


def problems(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What is wrong by the words that the schema uses; a word that is not known here is an error."""
    import re

    known = {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "pattern"}
    assert schema.keys() <= known | {"$schema", "title", "description", "minLength", "minimum", "maximum"}
    types = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if types and not any(isinstance(value, _TYPES[one]) for one in types):
        return [f"{where}: no {schema['type']}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is none of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{where}: {value!r} is not {schema['const']!r}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where}: {value!r} does not match")
    if len(value) < schema.get("minLength", 0) if isinstance(value, str) else False:
        found.append(f"{where}: too short")
    properties = schema.get("properties", {})
    if isinstance(value, dict):
        found += [f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value]
        if schema.get("additionalProperties") is False:
            found += [f"{where}: {name} is unknown" for name in value if name not in properties]
        for name, item in value.items():
            found += problems(item, properties.get(name, {}), f"{where}.{name}".lstrip("."))
    if isinstance(value, list) and "items" in schema:
        for place, item in enumerate(value):
            found += problems(item, schema["items"], f"{where}[{place}]")
    return found


# -- explanations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 100])
def test_explanations_fit(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    print_titles(CATALOG.values(), console)
    for entry in CATALOG.values():
        print_entry(entry, {"Usual causes": "one; two"}, console)
    assert all(len(line.rstrip()) <= width for line in out.getvalue().splitlines())
