"""The rows of a record written as the logs of other trainers, by the facts of their formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from palingenesis.record.format import NON_FINITE, STEP_KEY
from palingenesis.record.reader import Run

Rows = list[dict[str, float]]


def rows_of(run: Run) -> Rows:
    """The rows of a record as numbers, in the order in which they were written."""
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [{name: _number(value) for name, value in json.loads(line).items()} for line in lines]


def _number(value: Any) -> float:
    return NON_FINITE.get(value, math.nan) if isinstance(value, str) else float(value)


def _evaluations(row: Mapping[str, float], joint: str = "_") -> dict[str, float]:
    """``eval/code/loss`` as ``eval_code_loss``."""
    return {
        name.replace("/", joint): value
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/loss")
    }


def _norm(row: Mapping[str, float]) -> float | None:
    """Most trainers write the norm before clipping."""
    return row.get("train/grad_norm_raw", row.get("train/grad_norm"))


def _hugging_face(row: Mapping[str, float]) -> dict[str, float]:
    given = {"loss": row.get("train/loss"), "grad_norm": _norm(row), "learning_rate": row.get("train/lr")}
    known = {name: value for name, value in given.items() if value is not None}
    return {**known, "epoch": row.get("train/epoch", 0.0)}


def transformers_5(rows: Rows) -> Iterable[str]:
    """Quoted, four digits, no step."""
    for row in rows:
        yield repr({name: f"{value:.4g}" for name, value in _hugging_face(row).items()})
        if _evaluations(row):
            ended = {**_evaluations(row), "eval_runtime": 1.2, "epoch": row.get("train/epoch", 0.0)}
            yield repr({name: f"{value:.4g}" for name, value in ended.items()})


def trainer_state(rows: Rows) -> Iterable[str]:
    """``trainer_state.json``: everything, with bare NaN."""
    history = []
    for row in rows:
        history.append({**_hugging_face(row), "step": int(row[STEP_KEY])})
        if _evaluations(row):
            history.append(
                {**_evaluations(row), "epoch": row.get("train/epoch", 0.0), "step": int(row[STEP_KEY])}
            )
    yield json.dumps({"global_step": history[-1]["step"], "log_history": history})


def megatron(rows: Rows) -> Iterable[str]:
    for row in rows:
        norm = _norm(row)
        told = "" if norm is None else f" grad norm: {norm:.3f} |"
        yield (
            f" [2026-01-01 00:00:00.0] iteration {int(row[STEP_KEY]):8d}/{len(rows):8d} | consumed samples: "
            f"{int(row[STEP_KEY]) * 16:12d} | elapsed time per iteration (ms): "
            f"{1000 * row['train/step_time_s']:.1f} | learning rate: {row.get('train/lr', 0.0):.6E} | global "
            f"batch size:    16 | lm loss: {row['train/loss']:.6E} | loss scale: 1.0 |{told} number of "
            "skipped iterations:   0 | number of nan iterations:   0 |"
        )


def torchtitan(rows: Rows) -> Iterable[str]:
    for row in rows:
        norm = _norm(row) or 0.0
        yield (
            f"[titan] 2026-01-01 00:00:00,000 - root - INFO - \x1b[31mstep: {int(row[STEP_KEY]):2d}  "
            f"\x1b[32mloss: {row['train/loss']:8.5f}  \x1b[38;2;180;60;0mgrad_norm: {norm:7.4f}  \x1b[33m"
            f"memory: 40.12GiB(50.00%)  \x1b[34mtps: {int(row['train/tokens_per_sec']):,}  "
            f"\x1b[36mtflops: 123.45  \x1b[35mmfu: {100 * row['train/mfu']:.2f}%\x1b[39m"
        )


def jsonl(rows: Rows) -> Iterable[str]:
    """The names of a record, one object a line, as somebody's own loop writes them."""
    for row in rows:
        yield json.dumps({name: value for name, value in row.items() if name != "train/batch"})


def numbers(rows: Rows) -> Iterable[str]:
    """One loss a line."""
    for row in rows:
        yield f"{row['train/loss']:.5f}"


WRITERS: dict[str, Callable[[Rows], Iterable[str]]] = {
    "transformers 5": transformers_5,
    "trainer_state": trainer_state,
    "Megatron-LM": megatron,
    "torchtitan": torchtitan,
    "JSONL": jsonl,
    "one number a line": numbers,
}


def write_as(name: str, run: Run, path: Path, *after: str) -> Path:
    """A record's rows as another trainer's log, with lines that came after it."""
    path.write_text("\n".join([*WRITERS[name](rows_of(run)), *after]) + "\n")
    return path
