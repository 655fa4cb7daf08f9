"""A run's folder at both ends: opening the record, learning again from one that is resumed, the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from palingenesis.errors import RecordBusyError, RecordError, RecordExistsError
from palingenesis.journal import Journal, log
from palingenesis.record.reader import Run, load_run
from palingenesis.record.start import last_step
from palingenesis.record.verdict import judge
from palingenesis.record.writer import RecordWriter
from palingenesis.watch.replay import replay
from palingenesis.watchers import Watchers


def open_record(
    out: str | Path | None, info: dict[str, Any], *, resume: bool, overwrite: bool
) -> RecordWriter | None:
    """The writer of a run's record; ``None`` where none is wanted or the folder cannot be written.

    Raises:
        RecordExistsError, RecordBusyError: the folder is another run's. Losing that one, or mixing the two,
            would be worse than not starting.
    """
    if out is None:
        return None
    try:
        return RecordWriter(out, info, resume=resume, overwrite=overwrite)
    except (RecordExistsError, RecordBusyError):
        raise
    except RecordError as error:
        log.warning("%s; the run is monitored without a record", error)
        return None


def recorded_step(out: str | Path | None, writer: RecordWriter | None, *, resume: bool) -> int:
    """The step that a run goes on from: the last one recorded, on the ranks that do not write it too."""
    if writer is not None:
        return writer.last_step if writer.resumed else 0
    return last_step(Path(out)) if out is not None and resume else 0


def learn_from(run: Run, step: int, watchers: Watchers) -> None:
    """Learn the baselines again from the checks and losses recorded up to ``step``."""
    steps = run.layers["step"]
    until = steps <= step
    names = watchers.layers.layers
    norms = np.full((int(until.sum()), len(names)), np.nan)
    absent = np.ones(norms.shape, dtype=bool)
    for i, name in enumerate(names):
        if name in run.layers:
            norms[:, i] = run.layers[name][until]
            absent[:, i] = run.layers.absent(name)[until]
    replay(watchers.layers, steps[until].astype(int).tolist(), norms, absent)
    if "train/loss" in run.metrics:
        at, loss = run.metrics["step"], run.metrics["train/loss"]
        known = at <= step
        watchers.loss.check(
            list(zip(at[known].astype(int).tolist(), loss[known].tolist(), strict=True)), step=0
        )


def live_verdict(journal: Journal, before: Run | None, judged: int, consecutive: int, step: int) -> str:
    """One word on a run as if it ended now.

    Args:
        journal: what was told and counted.
        before: the record as it was when the run was resumed.
        judged: checks at which some layer was judged.
        consecutive: checks in a row that an alarm needs.
        step: the last step.
    """
    events = journal.events
    checks, silent = journal.counts["checks"], journal.counts["checks_without_gradients"]
    if before is not None:
        events = [*before.events, *events]
        checks += len(before.judged)
        silent += before.checks_without_gradients
        judged += int((before.judged > 0).sum())
    fired = judged if judged >= consecutive else 0
    return judge(events, checks, silent, fired, {"reason": "completed", "steps": step}).word


def write_report(folder: Path) -> None:
    """Write the report of a run that has ended, and log its verdict."""
    try:
        # Late: only the end of a run needs the report's templates.
        from palingenesis.report import write_html

        run = load_run(folder)
        page = write_html(run)
    except Exception as error:  # noqa: BLE001 - the record is whole; the page can be written again
        log.warning("the report of %s could not be written: %s: %s", folder, type(error).__name__, error)
        return
    log.info("%s: %s; report: %s", run.verdict, run.verdict_sentence, page)
