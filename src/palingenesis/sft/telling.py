"""What a person sees of a run: lines in ``train.log`` and on stderr, and a bar on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from palingenesis.tiers.console import line_of

LOG_FILE = "train.log"
log = logging.getLogger("palingenesis")

_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}


class Teller:
    """Tells rows as they are recorded.

    Args:
        progress: the bar, where there is a terminal.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._task = progress, TaskID(0)

    def begin(self, step: int, last: int) -> None:
        """Training goes from a step to the last one."""
        if self._progress is not None:
            self._task = self._progress.add_task("", total=last, completed=step, loss="", speed="")

    def row(self, row: Mapping[str, Any]) -> None:
        """A row was recorded."""
        # The steps between two rows have a loss only.
        if "train/step_time_s" in row or "eval/loss" in row:
            log.info("%s", line_of(row))
        if self._progress is not None and "train/step_time_s" in row:
            self._progress.update(
                self._task,
                completed=row["train/global_step"],
                loss=f"loss {row['train/loss']:.4f}" if "train/loss" in row else "",
                speed=f"{row['train/tokens_per_sec_global']:.0f} tok/s",
            )


@contextmanager
def telling(folder: Path, *, main: bool) -> Iterator[Teller]:
    """The time of a run, in which the package's log goes to ``train.log`` in its folder and to stderr.

    Args:
        folder: of the run; it exists.
        main: this is rank 0. Other ranks tell warnings only.
    """
    console = _Stderr(stderr=True, highlight=False)
    progress = _bar(console) if main and console.is_terminal else None
    handlers: list[logging.Handler] = [_OnConsole(console, logging.INFO if main else logging.WARNING)]
    if main:
        handlers.append(logging.FileHandler(folder / LOG_FILE, encoding="utf-8"))
        handlers[-1].setFormatter(logging.Formatter(_FORMAT))
    before = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in handlers:
        log.addHandler(handler)
    try:
        if progress is None:
            yield Teller(None)
        else:
            with progress:
                yield Teller(progress)
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.setLevel(before[0])
        log.propagate = before[1]


class _Stderr(Console):
    """Falls silent where nobody reads it any more; rich would end the process. The log file has it all."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class _OnConsole(logging.Handler):
    """Whole lines, above the bar if there is one; nothing in them is read as markup."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = Text(record.getMessage(), _STYLES.get(record.levelno, ""))
            self._console.print(text, soft_wrap=not self._console.is_terminal)
        except Exception:  # noqa: BLE001 - as every handler of the standard library: training goes on
            self.handleError(record)


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
    )
