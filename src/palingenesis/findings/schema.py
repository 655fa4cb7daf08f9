"""The JSON schema of what every command with findings prints under ``--json``."""

from __future__ import annotations

from typing import Any

from palingenesis.findings.finding import SEVERITIES
from palingenesis.findings.render import JSON_VERSION

#: Of a finding's id: section and name.
CHECK_PATTERN = "^[a-z][a-z0-9_]*\\.[a-z][a-z0-9_]*$"


def json_schema() -> dict[str, Any]:
    """The schema of what ``findings.render.to_json`` gives. A number that is not finite is a string."""
    finding = {
        "check": {
            "type": "string",
            "pattern": CHECK_PATTERN,
            "description": "Stable id; `pgs explain ID` says what it means.",
        },
        "severity": {
            "enum": list(SEVERITIES),
            "description": "`info` needs no action and does not change the exit code.",
        },
        "message": {"type": "string", "minLength": 1, "description": "One sentence with the numbers."},
        "evidence": {
            "type": "object",
            "description": "Numbers, and ids or line numbers of samples. What is not finite is a string: "
            '"NaN", "Infinity", "-Infinity".',
        },
        "fix": {
            "type": "string",
            "description": "The option to change, and to what value. Empty only where the severity is info.",
        },
        "since": {
            "type": ["integer", "null"],
            "description": "The step from which on it shows, where it belongs to a step.",
        },
        "confidence": {
            "type": ["number", "null"],
            "minimum": 0,
            "maximum": 1,
            "description": "Chance that it is so; null where it was counted and is no inference.",
        },
        "otherwise": {
            "type": "array",
            "items": {"type": "string"},
            "description": "What else could look like this.",
        },
        "next": {"type": "string", "description": "The experiment that tells it from these; may be empty."},
    }
    properties = {
        "version": {"const": JSON_VERSION, "description": "Of this form."},
        "command": {"type": "string", "description": "What was typed after `pgs`."},
        "exit_code": {
            "enum": [0, 1],
            "description": "0: nothing found, or info only. 1: a warning or worse. (2, bad input, has none.)",
        },
        "findings": {
            "type": "array",
            "description": "Worst first; a cause (`may_follow_from` in the evidence) with the worst that it "
            "explains.",
            "items": _closed(finding),
        },
        "facts": {"type": "object", "description": "Numbers that are no finding, by the command."},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Findings of a pgs command",
        "description": "See docs/findings.md of Palingenesis.",
        **_closed(properties),
    }


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with these properties, all of them and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
