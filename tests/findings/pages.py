"""docs/findings.md and docs/findings.schema.json, made from the catalog and the pathologies.

python -m tests.findings.pages       writes both anew
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from palingenesis.findings.catalog import CATALOG
from palingenesis.findings.doubts import DOUBTS
from palingenesis.findings.entry import Entry
from palingenesis.findings.pathologies import PATHOLOGIES, Pathology
from palingenesis.findings.schema import json_schema

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "findings.md"
SCHEMA = ROOT / "docs" / "findings.schema.json"

INTRODUCTION = """\
# Findings

A finding is a conclusion for a person: what was seen, how bad it is, on which evidence, and which option to
change to what value. Every command that finds something prints them alike, worst first, and `--json` gives
one document of one form ([schema](findings.schema.json)).

| severity | meaning | exit code |
|---|---|---|
| `critical` | the run is lost, or will be | 1 |
| `warning` | something should be changed | 1 |
| `info` | worth knowing, nothing has to be done | 0 |

Bad input and wrong usage are one line on stderr and exit code 2. `pgs explain ID` prints what this page
says about one finding, `pgs explain` lists all of them, and `pgs explain RUN` reads a run folder or any
trainer's log and tells what happened, causes before what followed from them.

```python
from palingenesis import load_run
from palingenesis.findings.pathologies import pathologies_of

for finding in pathologies_of(load_run("pgs_run")):
    print(finding.severity, finding.check, finding.message, finding.fix)
```

<!-- Made from src/palingenesis/findings by python -m tests.findings.pages; edit the entries there. -->
"""

TROUBLESHOOTING = """\
## Troubleshooting a run

What can be seen in a record, or in the log of any trainer as far as it has the numbers. A trend or a median
counts only where it is beyond doubt (one-sided chance of 1%), by rank statistics that a few wild values do
not move; every limit is a field of `findings.limits.Limits`. What a record lacks is no symptom.

Every such finding has the step from which on it shows (`since`), a `confidence`, what else could look like it
(`otherwise`) and the experiment that tells (`next`). Where one finding can explain another and began no
later, the second names it under `may_follow_from` and stands behind it; the one that began first leads. A
confidence is a chance by rule: 0.99 where the record says so itself, 0.9 where two signals of different kinds
agree, 0.75 where one shows what little else does, 0.5 where other causes show just the same; times 0.7 where
another finding may explain it, times 0.9 in a log that hides details. `python benchmarks/pathologies.py`
compares it with how often findings are right. Causes are told [below](#run).

| symptom | confirm | fix |
|---|---|---|
"""

#: What stands for the numbers of a run in the experiments.
_PLACES = {"since": "N", "third": "a third", "half": "half", "twice": "twice what it is"}
NOT_YET = "Not an option yet: {}."


def page() -> str:
    return f"{INTRODUCTION}\n{TROUBLESHOOTING}{''.join(_rows())}{''.join(_sections())}"


def _rows() -> Iterator[str]:
    for pathology in PATHOLOGIES:
        entry = CATALOG[pathology.check]
        # The anchor that mkdocs makes of the heading below.
        anchor = entry.check.replace(".", "")
        cells = [
            f"**{_md(entry.title)}**<br>[`{entry.check}`](#{anchor})<br>{_md(entry.meaning)}",
            _md(entry.confirm),
            _md(_fix(entry, pathology)),
        ]
        yield f"| {' | '.join(cells)} |\n"


def _fix(entry: Entry, pathology: Pathology) -> str:
    names = ", ".join(pathology.not_yet)
    return f"{entry.fix} {NOT_YET.format(names)}" if names else entry.fix


def _sections() -> Iterator[str]:
    """What is known of each finding; of pathologies, what the table above does not say."""
    of_runs = {pathology.check: pathology for pathology in PATHOLOGIES}
    for section, entries in groupby(sorted(CATALOG.values(), key=_section), key=_section):
        yield f"\n## {section}\n"
        for entry in entries:
            yield f"\n### {entry.check}\n\n**{_md(entry.title)}.** {_md(entry.meaning)}\n\n"
            yield f"*Why it matters.* {_md(entry.why)}\n\n"
            if entry.check in of_runs:
                yield from _of_pathology(of_runs[entry.check])
            else:
                yield f"*Confirm.* {_md(entry.confirm)}\n\n*Fix.* {_md(entry.fix)}\n\n"
            yield f"*Source.* {_md(entry.source)}\n"


def _of_pathology(pathology: Pathology) -> Iterator[str]:
    yield f"*Usual causes.* {_md('; '.join(pathology.causes))}.\n\n"
    if pathology.follows_from:
        yield f"*May follow from.* {', '.join(f'`{check}`' for check in pathology.follows_from)}.\n\n"
    doubt = DOUBTS[pathology.check]
    if doubt.otherwise:
        yield f"*What else could look like it.* {_md('; '.join(doubt.otherwise))}.\n\n"
    yield f"*To tell.* {_md(doubt.next.format_map(_PLACES))}.\n\n"


def _md(text: str) -> str:
    """A text that Markdown shows as it is, in a table too."""
    for mark in "\\|*_<>[]`":
        text = text.replace(mark, {"<": "&lt;", ">": "&gt;"}.get(mark, f"\\{mark}"))
    return text


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2) + "\n"


def _section(entry: Entry) -> str:
    return entry.check.split(".")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    SCHEMA.write_text(schema_text(), "utf-8")
