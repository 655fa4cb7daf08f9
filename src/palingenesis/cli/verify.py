"""``pgs verify RUN``: is the record as it was written?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from palingenesis.cli.codes import FOUND, OK
from palingenesis.cli.output import print_json, say


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Check the hash chain of a run's events, and metrics and layers against the digests of the run's end.

    Names the first line that was altered, moved, torn or is missing, or the file. Exit code 0: as it was
    written, 1: it is not, 2: there is no run to check.
    """
    from palingenesis.record.verify import in_words, verify

    result = verify(run)
    if json:
        print_json({"run": str(run), **result._asdict()})
    else:
        say(in_words(result))
    return OK if result.ok else FOUND
