"""Run folders made once, and their pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.report import runs

from palingenesis.record.reader import Run, load_run
from palingenesis.report import write_html

MAKERS: dict[str, Callable[[Path], Path]] = {
    name: getattr(runs, name)
    for name in (
        "healthy",
        "faulty",
        "nasty",
        "killed",
        "resumed",
        "warming_up",
        "bare",
        "one_layer",
        "all_nan",
        "not_monitored",
        "one_bad_loss",
        "accepted",
        "big",
    )
}
SMALL = [name for name in MAKERS if name != "big"]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run by name; its page is in it."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp("runs") / name)
            write_html(load_run(made[name]))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def run_of(folder_of: Callable[[str], Path]) -> Callable[[str], Run]:
    """A run by name."""
    return lambda name: load_run(folder_of(name))


@pytest.fixture(scope="session")
def page_of(folder_of: Callable[[str], Path]) -> Callable[[str], str]:
    """The source of a run's page."""
    return lambda name: (folder_of(name) / "report.html").read_text(encoding="utf-8")
