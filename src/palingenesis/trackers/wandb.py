"""Weights & Biases: online where a key is configured, else offline files in the run's folder."""

from __future__ import annotations

import netrc
import os
import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from palingenesis.record.format import STEP_KEY
from palingenesis.trackers.base import need
from palingenesis.trackers.wandb_file import held_offline

_PUBLIC_URL = "https://api.wandb.ai"
#: Seconds that offline files may take to be complete, once a run is finished.
_WRITTEN_WITHIN = 10.0
#: Seconds for the server to know of the run, and to take what is left at its end.
_INIT_WITHIN, _FINISH_WITHIN = 30.0, 20.0
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbTracker:
    """Rows carry their step as ``train/global_step``, which every chart has as its x-axis.

    wandb's own step only counts rows: it may not go back, so that steps run again after a crash would be
    dropped, and all that follows with them.
    """

    name = "wandb"

    def __init__(self, folder: Path, project: str, *, lazy: bool = False) -> None:
        self._wandb = need("wandb")
        self._folder, self._project, self._lazy = folder, project, lazy
        self._run: Any = None
        self._init: dict[str, Any] = {}
        self._row: int | None = None  # wandb's step of the next row, where it does not know it itself
        self.where = str(folder / "wandb")

    def open(self, run_id: str, name: str, config: Mapping[str, Any]) -> Mapping[str, int]:
        self._init = {"id": run_id, "name": name, "config": dict(config), "project": self._project}
        if not offline():
            self._start(None)
            return _held_online(self._run)
        held, self._row = held_offline(self._folder / "wandb", run_id)
        if not self._lazy:  # each start makes one more folder of files
            self._start("offline")
        return held

    def _start(self, mode: str | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._wait_for_a_name()
        # Its console is not ours to wrap, and its banners not ours to print.
        settings = {"silent": True, "console": "off", **self._patience()}
        if mode is not None:
            settings["mode"] = mode
        self._run = self._wandb.init(
            **self._init,
            dir=str(self._folder),
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(**settings),
        )
        self._run.define_metric(STEP_KEY)
        self._run.define_metric("*", step_metric=STEP_KEY, step_sync=True)
        self.where = str(Path(self._run.dir).parent if self._run.offline else self._run.url)

    def _patience(self) -> dict[str, Any]:
        """wandb waits for its own calls to end when the process does, for ever if the server is away."""
        ours = {"init_timeout": _INIT_WITHIN, "finish_timeout": _FINISH_WITHIN, "finish_timeout_raises": True}
        return {key: value for key, value in ours.items() if f"WANDB_{key.upper()}" not in os.environ}

    def _wait_for_a_name(self) -> None:
        """wandb names its folder by the second, and would write over the files of one that is there."""
        while list(
            (self._folder / "wandb").glob(f"*run-{clock.strftime('%Y%m%d_%H%M%S')}-{self._init['id']}")
        ):
            clock.sleep(0.05)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        if self._run is None:
            self._start("offline")
        self._run.log({**values, STEP_KEY: step, "_timestamp": time}, step=self._row, commit=True)
        if self._row is not None:
            self._row += 1

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.finish()
        if self._row is not None:
            self._see_that_it_is_written(self._row)

    def _see_that_it_is_written(self, rows: int) -> None:
        """wandb's own process writes the file, and some milliseconds after ``finish`` came back."""
        end = clock.monotonic() + _WRITTEN_WITHIN
        while (found := held_offline(self._folder / "wandb", self._init["id"])[1]) < rows:
            if clock.monotonic() > end:
                raise OSError(f"{found} of {rows} rows are in wandb's files in {self._folder / 'wandb'}")
            clock.sleep(0.02)


def _held_online(run: Any) -> dict[str, int]:
    """What the server has: every metric it has ever had, up to the last step it has."""
    summary = dict(run.summary)
    last = summary.get(STEP_KEY)
    if not run.resumed or not isinstance(last, (int, float)):
        return {}
    return {key: int(last) for key in summary if not key.startswith("_")}


def offline() -> bool:
    """Whether rows go to files: as the user says, or because wandb could not log in."""
    mode = os.environ.get("WANDB_MODE")
    return mode == "offline" if mode else not has_key()


def has_key() -> bool:
    """Whether wandb can log in: a key in the environment, or of this host in the netrc file."""
    if any(os.environ.get(name) for name in _KEYS):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or _PUBLIC_URL).hostname or ""
    given = os.environ.get("NETRC")
    for path in [Path(given)] if given else [Path("~/.netrc"), Path("~/_netrc")]:
        try:
            if netrc.netrc(path.expanduser()).hosts.get(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
