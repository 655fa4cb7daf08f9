"""``pgs explain ID``: what a finding means, why it matters, how to confirm it, how to fix it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from palingenesis.cli.codes import OK
from palingenesis.cli.output import print_json
from palingenesis.errors import ConfigError


def explain(
    check: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The finding's id; without one, all are listed.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Say what a finding means, why it matters, how to confirm it and how to fix it.

    Exit code 0: it was explained, 2: no finding has this id.
    """
    from palingenesis.findings.catalog import CATALOG

    if check is None:
        listed = CATALOG.values()
        if json:
            print_json({"findings": [{"check": entry.check, "title": entry.title} for entry in listed]})
            return OK
        from rich.console import Console

        from palingenesis.findings.render import print_titles

        print_titles(listed, Console())
        return OK
    entry = CATALOG.get(check.replace("-", "_"))
    if entry is None:
        raise ConfigError(_unknown(check))
    known = _known_of_runs(entry.check)
    if json:
        print_json({**dataclasses.asdict(entry), **known})
        return OK
    from rich.console import Console

    from palingenesis.findings.render import print_entry

    print_entry(entry, _in_words(known), Console())
    return OK


def _unknown(check: str) -> str:
    from palingenesis.findings.catalog import CATALOG, nearest

    near = nearest(check)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"no finding is called {check!r}: {hint}`pgs explain` lists the {len(CATALOG)} that there are"


def _known_of_runs(check: str) -> dict[str, Any]:
    """What is known of a pathology of runs beyond the catalog; nothing for other findings."""
    from palingenesis.findings.pathologies import PATHOLOGIES

    for pathology in PATHOLOGIES:
        if pathology.check == check:
            return {
                "causes": list(pathology.causes),
                "follows_from": list(pathology.follows_from),
                "not_yet": list(pathology.not_yet),
            }
    return {}


def _in_words(known: dict[str, Any]) -> dict[str, str]:
    headings = {
        "causes": "Usual causes",
        "follows_from": "May follow from",
        "not_yet": "Remedies that are not options yet",
    }
    return {headings[name]: "; ".join(items) for name, items in known.items() if items}
