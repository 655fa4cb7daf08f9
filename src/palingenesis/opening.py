"""Opening a run's record, and learning again from one that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from palingenesis.errors import RecordBusyError, RecordError, RecordExistsError
from palingenesis.journal import log
from palingenesis.record.reader import load_run
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


def continue_from_record(folder: Path, step: int, watchers: Watchers) -> None:
    """Learn the baselines again from the checks and losses recorded up to ``step``."""
    run = load_run(folder)
    steps = run.layers["step"]
    until = steps <= step
    names = [name for name in watchers.layers.layers if name in run.layers]
    if names and until.any():
        everywhere = watchers.layers.layers
        norms = np.full((int(until.sum()), len(everywhere)), np.nan)
        absent = np.ones(norms.shape, dtype=bool)
        for i, name in enumerate(everywhere):
            if name in run.layers:
                norms[:, i] = run.layers[name][until]
                absent[:, i] = run.layers.absent(name)[until]
        replay(watchers.layers, steps[until].astype(int).tolist(), norms, absent)
    if "train/loss" in run.metrics:
        seen = run.metrics["step"] <= step
        losses = zip(
            run.metrics["step"][seen].astype(int).tolist(),
            run.metrics["train/loss"][seen].tolist(),
            strict=True,
        )
        watchers.loss.check([(at, loss) for at, loss in losses], step=0)
