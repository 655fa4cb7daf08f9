"""What the demonstration shows while it runs: a progress bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from palingenesis.demo.faults import WHAT_HAPPENS, PlannedFault
from palingenesis.demo.options import LOSS_WINDOW
from palingenesis.demo.result import DemoResult, DemoRun

PLAIN_LINES_A_RUN = 5
LOGGER = "palingenesis"


class LogLines(logging.Handler):
    """Shows what the monitor logs, which is where alarms appear for anyone who trains, as lines of ours."""

    def __init__(self, show: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        style = "bold red" if record.levelno >= logging.ERROR else "bold yellow"
        self._show(f"  {record.getMessage()}", style)


class Display:
    """Draws one run after the other on a console."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._every = max(1, steps // PLAIN_LINES_A_RUN)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._planned: PlannedFault | None = None

    def line(self, text: str, style: str = "") -> None:
        """One line, whole, above the bar if there is one; nothing in it is read as markup."""
        self._console.print(Text(text, style), soft_wrap=not self._console.is_terminal)

    @contextmanager
    def run(self, title: str, planned: PlannedFault | None = None) -> Iterator[None]:
        """The time of one training run, in which the monitor's log is shown among our own lines."""
        self._planned = planned
        self.line(title, "bold")
        if self._console.quiet:
            yield
            return
        log, handler = logging.getLogger(LOGGER), LogLines(self.line)
        log.addHandler(handler)
        try:
            with self._bar() if self._console.is_terminal else nullcontext():
                yield
        finally:
            log.removeHandler(handler)

    @contextmanager
    def _bar(self) -> Iterator[None]:
        columns = (
            BarColumn(),
            TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            TextColumn("loss {task.fields[loss]:.2f}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as self._progress:
            self._task = self._progress.add_task("", total=self._steps, loss=math.nan)
            yield
        self._progress = None

    def step(self, step: int, loss: float) -> None:
        """A step was taken; the last one before the fault says what is about to happen."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, loss=loss)
        elif step % self._every == 0:
            self.line(f"  step {step} of {self._steps}, loss {loss:.2f}")
        if self._planned is not None and step == self._planned.after_step:
            self.line(f"  step {step}: {self._planned.layer} {WHAT_HAPPENS[self._planned.fault]}", "cyan")

    def closing(self, result: DemoResult) -> None:
        """Both verdicts, where the reports are, and what to do next."""
        table = Table.grid(padding=(0, 2))
        _add_run(table, "healthy run", result.healthy)
        last = result.healthy
        if result.faulty is not None:
            _add_run(table, "faulty run", result.faulty)
            last = result.faulty
        sentences = [Text(_conclusion(result), "green" if result.ok else "bold red"), Text()]
        hint = Text(f"Open a report in a browser, or read it here: pgs report {last.folder} --format text")
        self._console.print(Panel(Group(*sentences, table, Text(), hint), title="pgs demo", expand=False))


def _add_run(table: Table, title: str, run: DemoRun) -> None:
    table.add_row(title, Text(run.verdict, "bold"))
    table.add_row("", "mean loss", Text(_losses(run), overflow="fold"))
    table.add_row("", "report", Text(str(run.report), overflow="fold"))


def _losses(run: DemoRun) -> str:
    first, last = f"{run.first_loss:.2f}", f"{run.last_loss:.2f}"
    return f"{first} in the first {LOSS_WINDOW} steps, {last} in the last {LOSS_WINDOW}"


def _conclusion(result: DemoResult) -> str:
    if result.healthy.verdict != "HEALTHY":
        return f"The healthy run was called {result.healthy.verdict}; it should be HEALTHY."
    if result.faulty is None:
        return "Nothing was broken, and nothing rang."
    alarm = result.faulty.first_alarm
    if alarm is None:
        return f"{result.broken_layer} was broken after step {result.fault_step}, and nothing rang."
    if alarm.layer != result.broken_layer:
        return f"{result.broken_layer} was broken, but the first alarm names {alarm.layer}."
    return (
        f"{result.broken_layer} was broken after step {result.fault_step}; "
        f"the alarm named it at step {alarm.step} ({alarm.diagnosis})."
    )
