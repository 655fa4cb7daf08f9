"""The view of ``pgs monitor --follow``: drawn in place on a terminal, a line at each change in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing

from palingenesis.findings.status import Status

#: A look at a long log takes a while: so many times as long nothing is done after it.
_REST = 4
#: Seconds of waiting for a first loss after which it is said.
_PATIENCE = 2.0


def followed(source: str, *, every: float, brief: bool, silent: bool) -> Status:
    """Look at a log until its run has ended.

    Args:
        source: the log.
        every: seconds between two looks.
        brief: lines, on a terminal as well.
        silent: nothing is shown on the way.

    Returns:
        The last status.
    """
    looks = _looks(source, every)
    if silent:
        return _last(_waited_for(looks, source))
    if brief or not sys.stdout.isatty():
        return _in_lines(_waited_for(looks, source))
    return _in_place(looks, source)


def _waited_for(looks: Iterator[Status | None], source: str) -> Iterator[Status | None]:
    """Say once that there is nothing to show yet, where nothing else would."""
    began, told = time.monotonic(), False
    for status in looks:
        if status is None and not told and time.monotonic() - began > _PATIENCE:
            sys.stderr.write(f"pgs: {source}: no two losses yet; waiting for them\n")
            told = True
        yield status


def _looks(source: str, every: float) -> Iterator[Status | None]:
    """A status at each look, ``None`` while there is none, until the run has ended."""
    from palingenesis.errors import RunLogError
    from palingenesis.findings.status.source import Watch

    with closing(Watch(source)) as watch:
        while True:
            began = time.monotonic()
            closed = watch.closed  # before the look, which then has all of it
            status = watch.look()
            took = time.monotonic() - began
            yield status
            if closed and status is None:
                raise RunLogError(f"{source} has ended and holds no two losses: give the log of a run")
            if status is not None and (closed or (status.over and _quiet(status, every))):
                return
            time.sleep(max(every, _REST * took))


def _quiet(status: Status, every: float) -> bool:
    """Nothing comes any more: after its last step a run may evaluate once more."""
    return status.silence is None or status.silence.seconds >= every


def _last(looks: Iterator[Status | None]) -> Status:
    last = None
    for status in looks:
        last = status or last
    if last is None:
        raise AssertionError("looks end with a status")
    return last


def _in_lines(looks: Iterator[Status | None]) -> Status:
    from palingenesis.cli.output import say
    from palingenesis.findings.status.words import brief

    def told() -> Iterator[Status | None]:
        before: object = None
        for status in looks:
            now = None if status is None else (status.step, status.state, status.verdict)
            if status is not None and now != before:
                say(brief(status))
                sys.stdout.flush()
            before = now
            yield status

    return _last(told())


def _in_place(looks: Iterator[Status | None], source: str) -> Status:
    from rich.live import Live
    from rich.text import Text

    from palingenesis.findings.status.show import live
    from palingenesis.findings.status.source import report_of

    with Live(Text(f"{source}: no loss yet"), auto_refresh=False, transient=True) as view:

        def drawn() -> Iterator[Status | None]:
            for status in looks:
                if status is not None:
                    view.update(live(status, report_of(status)), refresh=True)
                yield status

        try:
            return _last(drawn())
        except KeyboardInterrupt:
            view.transient = False  # the last picture stays
            raise
