"""The catalog and the code agree: every finding that can be made is explained, every entry can be found."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from palingenesis.findings.catalog import CATALOG, Entry, nearest
from palingenesis.findings.pathologies import PATHOLOGIES
from palingenesis.findings.schema import CHECK_PATTERN

SOURCE = Path(__file__).parents[2] / "src" / "palingenesis"
ENTRIES = list(CATALOG.values())
#: What the first argument of makes a finding.
_MAKERS = {"Finding", "finding"}


def ids_in(tree: ast.AST) -> Iterator[tuple[str | None, int]]:
    """The ids that findings are made with, and their lines; ``None`` where it is not written out."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in _MAKERS:
            continue
        given = (
            node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "check"), None)
        )
        yield (given.value if isinstance(given, ast.Constant) else None), node.lineno


def made() -> dict[str, list[str]]:
    """Every id that findings are made with in the package, and where."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for check, line in ids_in(ast.parse(path.read_text("utf-8"))):
            if isinstance(check, str):
                found.setdefault(check, []).append(f"{path.relative_to(SOURCE)}:{line}")
    return found


def test_every_finding_that_is_made_is_explained() -> None:
    assert {check: where for check, where in made().items() if check not in CATALOG} == {}


def test_every_entry_is_of_a_finding_that_is_made() -> None:
    pathologies = {pathology.check for pathology in PATHOLOGIES}
    assert sorted(CATALOG.keys() - made().keys() - pathologies) == []


def test_ids_are_found_however_a_finding_is_made() -> None:
    code = "Finding('a.b', x)\nfindings.Finding(check='a.c')\nfinding('a.d')\nFinding(name)\nother('a.e')"
    assert list(ids_in(ast.parse(code))) == [("a.b", 1), ("a.c", 2), ("a.d", 3), (None, 4)]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.check)
def test_an_entry_says_everything(entry: Entry) -> None:
    assert re.fullmatch(CHECK_PATTERN, entry.check)
    for field in fields(entry):
        text = getattr(entry, field.name)
        assert text == " ".join(text.split()), field.name
        assert text, field.name
    assert not entry.title.endswith(".")
    assert len(entry.title) <= 80
    for text in (entry.meaning, entry.why, entry.confirm, entry.fix):
        assert text.endswith((".", "?", "…", ")")), text


def test_titles_tell_findings_apart() -> None:
    titles = [entry.title for entry in ENTRIES]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("run.lr_to_high", "run.lr_too_high"),
        ("overfitting", "run.overfitting"),
        ("run.overfiting", "run.overfitting"),
    ],
)
def test_a_slip_is_led_back(slip: str, meant: str) -> None:
    assert nearest(slip)[0] == meant


def test_nonsense_is_near_nothing() -> None:
    assert nearest("xyzzy") == []
    assert nearest("") == []
