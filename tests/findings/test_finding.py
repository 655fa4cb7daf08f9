"""Findings and reports: what may be made, the order, and the one exit rule."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from palingenesis.cli.codes import FOUND, OK
from palingenesis.findings import Finding, Report


def finding(severity: Any, check: str = "masking.no_loss_tokens") -> Finding:
    return Finding(check, severity, "12 samples have none.", {"lines": [3]}, "data.max_seq_length: 4096")


@pytest.mark.parametrize(
    ("severities", "code"),
    [
        ([], OK),
        (["info"], OK),
        (["info", "info"], OK),
        (["warning"], FOUND),
        (["critical"], FOUND),
        (["info", "warning"], FOUND),
    ],
)
def test_the_exit_code_goes_by_the_worst(severities: list[str], code: int) -> None:
    assert Report("validate", tuple(map(finding, severities))).code == code


def test_a_report_shows_the_worst_first_and_else_keeps_its_order() -> None:
    given = [
        finding("info", "a.one"),
        finding("critical", "a.two"),
        finding("warning", "a.three"),
        finding("critical", "a.four"),
    ]
    ordered = Report("validate", tuple(given)).ordered
    assert [one.check for one in ordered] == ["a.two", "a.four", "a.three", "a.one"]


def test_only_information_may_be_without_a_fix() -> None:
    Finding("a.b", "info", "It is so.", {}, "")
    with pytest.raises(ValueError, match=r"a\.b is a warning without a fix"):
        Finding("a.b", "warning", "It is so.", {}, "")


def test_an_unknown_severity_is_refused() -> None:
    with pytest.raises(ValueError, match="severity 'bad'"):
        finding("bad")


def test_findings_can_be_copied_and_pickled() -> None:
    one = finding("warning")
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_cause_is_as_bad_as_what_it_explains() -> None:
    given = [
        finding("warning", "a.other"),
        finding("info", "a.root"),
        replace(finding("warning", "a.middle"), evidence={"may_follow_from": ["a.root"]}),
        replace(finding("critical", "a.end"), evidence={"may_follow_from": ["a.middle"]}),
    ]
    ordered = Report("explain", tuple(given)).ordered
    assert [one.check for one in ordered] == ["a.root", "a.middle", "a.end", "a.other"]


@pytest.mark.parametrize("confidence", [-0.1, 1.5, float("nan")])
def test_a_confidence_is_a_chance(confidence: float) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1"):
        replace(finding("warning"), confidence=confidence)
