"""TensorBoard: event files in the run's folder, written without torch."""

from __future__ import annotations

import json
import os
import re
import socket
import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palingenesis.record.format import encodable
from palingenesis.trackers.base import last_steps, need

_VERSION = "brain.Event:2"
_CONFIG_TAG = "config/text_summary"


class TensorBoardTracker:
    """One folder a run, whose name ends in the run's id: what is in one folder is one run to TensorBoard.

    Each row is in the file when ``log`` returns; TensorBoard's own writer has a thread that loses some rows
    when the process is killed.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._event = need("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = need("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._record_writer = need("tensorboard.summary.writer.record_writer", "tensorboard").RecordWriter
        self._loader = need("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
        self._folder = folder / "tensorboard"
        self._writer: Any = None
        self.where = str(self._folder)

    def open(self, run_id: str, name: str, config: Mapping[str, Any]) -> Mapping[str, int]:
        there = sorted(self._folder.glob(f"*-{run_id}"))
        run = there[0] if there else self._folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}-{run_id}"
        run.mkdir(parents=True, exist_ok=True)
        self.where = str(run)
        held = self._held(run)
        started = clock.time()
        # A name of its own: a file that another process left with half a record in it is not gone on with.
        # TensorBoard reads files in the order of their names, so fractions of a second belong in them.
        path = run / f"events.out.tfevents.{started:.6f}.{socket.gethostname()}.{os.getpid()}.{_unique()}"
        self._writer = self._record_writer(path.open("xb"))
        self._write(self._event.Event(wall_time=started, file_version=_VERSION))
        if not held and config:
            self._write_config(config, started)
        return held

    def _held(self, run: Path) -> dict[str, int]:
        held: dict[str, int] = {}
        for path in sorted(run.glob("events.out.tfevents.*")):
            for event in self._loader.EventFileLoader(str(path)).Load():
                last_steps(held, event.step, {value.tag: None for value in event.summary.value})
        held.pop(_CONFIG_TAG, None)
        return held

    def _write_config(self, config: Mapping[str, Any], when: float) -> None:
        metadata = need("tensorboard.plugins.text.metadata", "tensorboard")
        tensor = need("tensorboard.compat.proto.tensor_pb2", "tensorboard").TensorProto
        text = need("tensorboard.compat.proto.types_pb2", "tensorboard").DT_STRING
        # Indented by four: preformatted text in Markdown, which is what TensorBoard shows.
        lines = json.dumps(encodable(config), indent=2).splitlines()
        value = self._summary.Value(
            tag=_CONFIG_TAG,
            metadata=metadata.create_summary_metadata("config", ""),
            tensor=tensor(dtype=text, string_val=["\n".join(f"    {line}" for line in lines).encode()]),
        )
        self._write(self._event.Event(wall_time=when, step=0, summary=self._summary(value=[value])))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        )
        self._write(self._event.Event(wall_time=time, step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _unique() -> str:
    return f"{clock.monotonic_ns():x}"
