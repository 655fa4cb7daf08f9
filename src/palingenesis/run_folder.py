"""A run's folder at both ends: opening the journal and its record, learning again from one that is resumed,
writing the end and the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from palingenesis import lifecycle
from palingenesis.batches import Batches
from palingenesis.config import MonitorConfig
from palingenesis.describe import rank_and_world_size
from palingenesis.errors import RecordBusyError, RecordError, RecordExistsError
from palingenesis.events import Event
from palingenesis.journal import Journal, log
from palingenesis.reading import Reading
from palingenesis.record.reader import Run, load_run
from palingenesis.record.start import last_step
from palingenesis.record.verdict import judge
from palingenesis.record.writer import RecordWriter
from palingenesis.watch.replay import replay
from palingenesis.watchers import Watchers


def open_journal(
    out: str | Path | None,
    info: dict[str, Any],
    config: MonitorConfig,
    on_event: Callable[[Event], object] | None,
    on_reading: Callable[[Reading], object] | None,
    on_row: Callable[[dict[str, Any]], object] | None,
    *,
    resume: bool,
    overwrite: bool,
) -> Journal:
    """The journal of a run, which on rank 0 also writes its record.

    Args:
        out: the run's folder.
        info: what run.json says of the run, besides the configuration.
        config: the monitor's.
        on_event, on_reading, on_row: the user's; ``on_row`` only on rank 0.
        resume, overwrite: as ``Monitor`` takes them.

    Raises:
        RecordExistsError, RecordBusyError: as of :func:`open_record`.
    """
    rank, _ = rank_and_world_size()
    info |= {"config": config.model_dump(mode="json")}
    writer = open_record(out, info, resume=resume, overwrite=overwrite) if rank == 0 else None
    folder = None if out is None or (rank == 0 and writer is None) else Path(out)
    on_row = on_row if rank == 0 else None
    batches = Batches(config, folder)
    return Journal(writer, on_event, on_reading, on_row=on_row, batches=batches, quiet=rank != 0)


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


def close_record(journal: Journal, step: int, error: BaseException | None) -> None:
    """Tell and write the end of a run, and its report.

    Args:
        journal: the run's.
        step: the last step.
        error: what ended the run, if it did not complete.
    """
    writer = journal.writer
    journal.tell([lifecycle.ended(step, error, {} if writer is None else writer.seal())])
    if writer is not None:
        writer.close(lifecycle.end_of(step, error, journal.counts))
        write_report(writer.folder)


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
