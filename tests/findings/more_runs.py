"""More records with one thing wrong, and their twins: of layers, ranks, steps, and how a run ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.findings.runs import (
    BUILDERS,
    INFO,
    Builder,
    changed,
    event,
    healthy_rows,
    resumed,
    rng,
    started,
    write,
)

from palingenesis.events import Event
from palingenesis.record.reader import Run, load_run
from palingenesis.record.writer import RecordWriter


def no_gradients(folder: Path, seed: int, sick: bool) -> Run:
    found = [event("no_gradients", 50, watched=3)]
    return write(folder, healthy_rows(seed), found if sick else [])


def rank_outlier(folder: Path, seed: int, sick: bool) -> Run:
    """The twin's was in steps that were run again."""
    told = event("rank_outlier", 150, rank=1, layer="head", value=3.0, superseded=not sick)
    return write(folder, healthy_rows(seed), [told])


def not_optimized(folder: Path, seed: int, sick: bool) -> Run:
    """A head that was replaced after the optimizer was made; the twin's optimizer got it too."""
    severity = "warning" if sick else "info"
    fields = {"replaced": ["head.weight"], "not_optimized": ["head.weight"] if sick else []}
    return write(folder, healthy_rows(seed), [event("parameters_changed", 200, severity, **fields)])


def never_trained(folder: Path, seed: int, sick: bool) -> Run:
    told = event("alarm", 450, layer="embed", diagnosis="never_trained", since=1, cause="it is None")
    return write(folder, healthy_rows(seed), [told] if sick else [])


def layer_stopped(folder: Path, seed: int, sick: bool) -> Run:
    """Two layers go silent together; the incident says which first. The twin's layer only vanished."""
    kind = "no_gradient" if sick else "vanishing"
    rang = [
        event("alarm", 250, layer=layer, diagnosis=kind, since=200, incident="1")
        for layer in ("embed", "blocks.0")
    ]
    told = event("incident", 250, incident="1", origin="blocks.0", layers=["blocks.0", "embed"])
    return write(folder, healthy_rows(seed), [*rang, told])


def layer_vanishing(folder: Path, seed: int, sick: bool) -> Run:
    return layer_stopped(folder, seed, not sick)


def layer_exploding(folder: Path, seed: int, sick: bool) -> Run:
    """A spike of twenty steps between two checks; the twin's is large and ordinary."""
    severity = "warning" if sick else "info"
    return write(
        folder,
        healthy_rows(seed),
        [event("gradient_spike", 333, severity, layer="head", layers=["head"], ratio=800.0)],
    )


def steps_skipped(folder: Path, seed: int, sick: bool) -> Run:
    """A fifth of the steps; the twin's scaler looks for its scale at the start."""
    steps = range(5, 600, 5) if sick else range(1, 9)
    return write(
        folder, healthy_rows(seed), [event("skipped_step", step, "info", scale=1.0) for step in steps]
    )


def evaluation_lost(folder: Path, seed: int, sick: bool) -> Run:
    rows = healthy_rows(seed)
    if sick:
        rows[299]["eval/loss"] = float("nan")
    return write(folder, rows)


def memory_grows(folder: Path, seed: int, sick: bool) -> Run:
    """The twin's memory goes up and down with the rows."""
    random = rng(seed + 100)
    rows = healthy_rows(seed)
    for row in rows:
        if "health/cuda_utilization_pct" in row:
            held = 35 + (0.06 * row["train/global_step"] if sick else 0) + random.normal(0, 2)
            row |= {"health/cuda_allocated_gb": held, "health/cuda_utilization_pct": held / 0.8}
    return write(folder, rows)


def memory_unused(folder: Path, seed: int, sick: bool) -> Run:
    random = rng(seed + 100)
    rows = changed(
        healthy_rows(seed),
        health__cuda_utilization_pct=lambda step, _: random.normal(18 if sick else 45, 2),
    )
    return write(folder, rows)


def failed(folder: Path, seed: int, sick: bool) -> Run:
    end = {"reason": "exception", "error": "ValueError: no such row"} if sick else {}
    return write(folder, healthy_rows(seed), end=end)


def other_warnings(folder: Path, seed: int, sick: bool) -> Run:
    told = event("global_shift", 400, "warning" if sick else "info", value=2.1, sudden=True)
    return write(folder, healthy_rows(seed), [told])


def forgetting_source(folder: Path, seed: int, sick: bool) -> Run:
    """A source that is not trained on gets worse from the start; the twin's stays as it was."""
    random = rng(seed + 100)
    rows = changed(
        healthy_rows(seed),
        eval__chat__loss=lambda step, _: 1.5 + (0.1 * step / 60 if sick else 0) + random.normal(0, 0.01),
    )
    return write(folder, rows)


def lr_schedule_planned(folder: Path, seed: int, sick: bool) -> Run:
    """A run that was cut off in the middle, whose schedule was stepped at each of two micro-batches."""
    times = 2 if sick else 1
    rows = healthy_rows(seed)[:280]
    for row in rows:
        done = np.clip((times * row["train/global_step"] - 30) / 570, 0, 1)
        row["train/lr"] = 2e-5 * min(times * row["train/global_step"] / 30, 0.5 * (1 + np.cos(np.pi * done)))
    training = {"schedule": "cosine", "total_steps": 600, "warmup_steps": 30, "accumulation": 2}
    writer = RecordWriter(folder, {**INFO, "training": {**training, "learning_rate": 2e-5}})
    writer.event(started())
    for row in rows:
        writer.metrics({"time": 1000.0, **row})
    writer.close({"reason": "completed", "error": None, "steps": 280, "counts": {}})
    return load_run(folder)


def packing_by_design(folder: Path, seed: int, sick: bool) -> Run:
    """TRL's two ways to pack."""
    options = {"packing": True, "packing_strategy": "wrapped" if sick else "bfd"}
    writer = RecordWriter(folder, {**INFO, "training": {"by": "trl", "packing": True, "options": options}})
    writer.event(started())
    for row in healthy_rows(seed, 60):
        writer.metrics({"time": 1000.0, **row})
    writer.close({"reason": "completed", "error": None, "steps": 60, "counts": {}})
    return load_run(folder)


def loss_spike_numbers(folder: Path, seed: int, sick: bool) -> Run:
    """Without events: one loss of five times its neighbours, or of 1.15 times."""
    rows = changed(
        healthy_rows(seed), train__loss=lambda step, old: old * (5 if sick else 1.15) if step == 300 else old
    )
    return write(folder, rows)


def zero_loss_without_norm(folder: Path, seed: int, sick: bool) -> Run:
    """A log that has no norms; the twin's loss comes down to 0 step by step."""
    rows = changed(
        healthy_rows(seed),
        train__grad_norm=lambda step, _: None,
        train__grad_norm_raw=lambda step, _: None,
        train__loss=lambda step, old: (
            0.0 if step > 580 else old * (1.0 if sick else max(1e-9, 1 - step / 580) ** 3)
        ),
    )
    return write(folder, rows)


def chain(folder: Path, seed: int) -> Run:
    """A resume loads the wrong weights; then gradients grow, the loss spikes and is lost."""
    rows = healthy_rows(seed)
    second = [dict(row) for row in rows[300:]]
    for row in second:
        late = row["train/global_step"] - 300
        row["train/loss"] += 4.0
        row["train/grad_norm_raw"] *= np.exp(late / 40)
        if late > 250:
            row["train/loss"] = row["train/grad_norm_raw"] = float("nan")
    run = resumed(folder, rows[:300], second, 300)
    writer = RecordWriter(folder, INFO, resume=True)
    writer.events([event("loss_spike", 480, value=30.0, baseline=6.0)])
    writer.events([Event("nonfinite", 551, "critical", "lost", {"source": "loss", "layers": ["head"]})])
    writer.close({"reason": "completed", "error": None, "steps": 600, "counts": {}})
    return load_run(run.folder)


MORE: tuple[tuple[str, Builder], ...] = (
    ("run.no_gradients", no_gradients),
    ("run.rank_outlier", rank_outlier),
    ("run.not_optimized", not_optimized),
    ("run.never_trained", never_trained),
    ("run.layer_stopped", layer_stopped),
    ("run.layer_vanishing", layer_vanishing),
    ("run.layer_exploding", layer_exploding),
    ("run.steps_skipped", steps_skipped),
    ("run.evaluation_lost", evaluation_lost),
    ("run.memory_grows", memory_grows),
    ("run.slow_throughput", memory_unused),
    ("run.failed", failed),
    ("run.other_warnings", other_warnings),
    ("run.forgetting", forgetting_source),
    ("run.lr_schedule", lr_schedule_planned),
    ("run.packing_leak", packing_by_design),
    ("run.loss_spike", loss_spike_numbers),
    ("run.zero_loss_nan_norm", zero_loss_without_norm),
)
ALL = (*BUILDERS, *MORE)
