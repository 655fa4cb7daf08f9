"""Small records of runs with one thing wrong, and their healthy twins, made through the real writer.

Each builder takes a folder, a seed and whether the run is sick; but for that the twin is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palingenesis.events import Event
from palingenesis.record.reader import Run, load_run
from palingenesis.record.writer import RecordWriter

Builder = Callable[[Path, int, bool], Run]
COMPLETED: dict[str, Any] = {"reason": "completed", "error": None, "steps": 600, "counts": {}}
INFO: dict[str, Any] = {
    "name": "a run",
    "layers": ["embed", "blocks.0", "head"],
    "config": {"stable_rank_floor": 3.0, "drift_ceiling": 0.5, "rl_entropy_floor": 1.0},
}
BLOCKS = [f"model.layers.{number}" for number in range(6)]


def write(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Event] = (),
    end: Mapping[str, Any] | None = None,
    info: Mapping[str, Any] | None = None,
) -> Run:
    """A record of rows and events, in the order of their steps."""
    writer = RecordWriter(folder, {**INFO, **(info or {})})
    writer.event(started())
    for row in rows:
        writer.metrics({"time": 1000.0 + row["train/global_step"], **row})
    writer.events(sorted(events, key=lambda event: event.step))
    writer.close({**COMPLETED, **(end or {})})
    return load_run(folder)


def started() -> Event:
    return Event("run_started", 0, "info", "run started", {"record_version": 1, "name": "a run"})


def event(name: str, step: int, severity: Any = "warning", **fields: Any) -> Event:
    return Event(name, step, severity, f"{name} at {step}", fields)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def steps_of(count: int = 600) -> np.ndarray[Any, Any]:
    return np.arange(1, count + 1)


def healthy_rows(seed: int, count: int = 600) -> list[dict[str, Any]]:
    """Everything that a run records, as it is where all goes well: noisy, falling, uneven in length."""
    random, steps = rng(seed), steps_of(count)
    tokens = random.lognormal(8, 0.6, count).astype(int) + 1
    loss = (0.8 + 2.2 * np.exp(-steps / (count / 4))) * random.lognormal(0, 0.06, count)
    norm = (0.5 + np.exp(-steps / count)) * random.lognormal(0, 0.25, count)
    warm = max(count // 20, 1)
    rate = 2e-5 * np.minimum(steps / warm, 1)
    rate *= 0.5 * (1 + np.cos(np.pi * np.clip((steps - warm) / (count - warm), 0, 1)))
    seconds = tokens / 9000 * random.lognormal(0, 0.1, count)
    rows: list[dict[str, Any]] = []
    for place, step in enumerate(steps.tolist()):
        row = {
            "train/global_step": step,
            "train/loss": loss[place],
            "train/batch": f"{random.integers(1 << 47):012x}",
            "train/lr": rate[place],
            "train/grad_norm_raw": norm[place],
            "train/grad_norm": min(norm[place], 1.0),
            "train/tokens_total_all": int(tokens[: place + 1].sum()),
            "train/tokens_per_sec": tokens[place] / seconds[place],
            "train/step_time_s": seconds[place],
            "train/epoch": 2 * step / count,
            "train/mfu": random.normal(0.35, 0.02),
        }
        if step % 10 == 0:
            row |= {
                "health/grad_cosine_sim": random.normal(0.12, 0.1),
                "health/cuda_utilization_pct": random.normal(70, 3),
                "health/output_entropy": random.normal(2.1, 0.05),
                "health/output_entropy_se": 0.05,
            }
        if step % 60 == 0:
            fitted = 0.9 + 1.8 * np.exp(-step / (count / 4))
            row |= {"eval/loss": fitted + random.normal(0, 0.004), "eval/gap": 0.1}
            row |= {f"eval/{name}/loss": fitted + random.normal(0, 0.01) for name in ("code", "chat")}
        if step % 100 == 0:
            row |= {
                "health/update_lost_pct": random.uniform(0, 3),
                "health/update_lost_pct_se": 0.5,
                "health/weight_drift_max": 0.0002 * step,
                "health/stable_rank_min": 9.0 + random.normal(0, 0.1),
            }
            row |= {f"health/gw_ratio/{block}": random.lognormal(-5, 0.5) for block in BLOCKS}
            row |= {f"health/update_ratio/{block}": random.lognormal(-8, 0.2) for block in BLOCKS}
            row |= {"health/gw_ratio/lm_head": random.lognormal(-1, 0.5)}
        rows.append(row)
    return rows


def changed(rows: list[dict[str, Any]], **change: Callable[[int, Any], Any]) -> list[dict[str, Any]]:
    """Rows whose values of some metrics are made anew from the step and what was there.

    Names have ``__`` for ``/``; a value of ``None`` takes the metric out.
    """
    for row in rows:
        for name, make in change.items():
            key = name.replace("__", "/")
            if key in row:
                row[key] = make(row["train/global_step"], row[key])
                if row[key] is None:
                    del row[key]
    return rows


# -- one builder a pathology -------------------------------------------------------------------------------


def replicas_diverge(folder: Path, seed: int, sick: bool) -> Run:
    found = [event("replica_divergence", 200, "critical", parameter="blocks.0.weight", ranks=[1], value=3)]
    return write(folder, healthy_rows(seed), found if sick else [])


def no_zero_grad(folder: Path, seed: int, sick: bool) -> Run:
    """The twin has gradients that agree, from a large batch, and do not grow."""
    random = rng(seed + 100)
    rows = changed(
        healthy_rows(seed),
        health__grad_cosine_sim=lambda step, _: 1 - abs(random.normal(0, 0.01)),
        train__grad_norm_raw=lambda step, old: old * (step**0.8 if sick else 1),
    )
    return write(folder, rows)


def no_loss_tokens(folder: Path, seed: int, sick: bool) -> Run:
    """The twin has steps of loss 0 with a gradient (an objective may be 0), and short ones."""
    empty = {150, 151, 400}
    rows = changed(
        healthy_rows(seed),
        train__loss=lambda step, old: 0.0 if step in empty else old,
        train__grad_norm_raw=lambda step, old: 0.0 if sick and step in empty else old,
    )
    return write(folder, rows)


def no_loss_tokens_counted(folder: Path, seed: int, sick: bool) -> Run:
    """pgs train records NaN for a step without tokens, and its count of tokens stands still."""
    rows = healthy_rows(seed)
    if sick:
        rows[299] |= {
            "train/loss": float("nan"),
            "train/tokens_total_all": rows[298]["train/tokens_total_all"],
        }
    return write(folder, rows)


def lr_schedule(folder: Path, seed: int, sick: bool) -> Run:
    """The linear schedule of transformers, stepped four times a step; the twin's is stepped once."""
    times = 4 if sick else 1
    rows = changed(healthy_rows(seed), train__lr=lambda step, _: 2e-5 * max(0.0, 1 - times * step / 600))
    return write(folder, rows)


def lr_schedule_back(folder: Path, seed: int, sick: bool) -> Run:
    """A cosine that goes on after its end; the twin's is constant after a warm-up."""

    def rate(step: int, old: float) -> float:
        return 1e-5 * (1 + np.cos(np.pi * 2.5 * step / 600)) if sick else 2e-5 * min(step / 30, 1)

    return write(folder, changed(healthy_rows(seed), train__lr=rate))


def resumed(
    folder: Path,
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    from_step: int,
    tracked: bool = True,
) -> Run:
    """A run that was killed and resumed, with the steps after ``from_step`` run again."""
    writer = RecordWriter(folder, INFO)
    writer.event(started())
    for row in first:
        writer.metrics({"time": 1.0, **row})
    writer.close(COMPLETED)
    writer = RecordWriter(folder, INFO, resume=True)
    writer.event(Event("run_resumed", from_step, "info", "goes on", {"from_step": from_step}))
    for row in second:
        writer.metrics({"time": 2.0, **row})
    writer.close(COMPLETED)
    if tracked:
        (folder / "tracker_run_id.json").write_text("{}")
    return load_run(folder)


def data_after_resume(folder: Path, seed: int, sick: bool) -> Run:
    """The sick run begins its data anew; the twin's second pass has some batches of the first."""
    rows = healthy_rows(seed)
    rows[450]["train/batch"] = rows[20]["train/batch"]
    second = [dict(row) for row in rows[200:]]
    if sick:
        for row, source in zip(second, rows, strict=False):
            row["train/batch"] = source["train/batch"]
    return resumed(folder, rows[:200], second, 200)


def data_changed_by_resume(folder: Path, seed: int, sick: bool) -> Run:
    """Steps 201 to 230 are run again: with other batches, or with the same ones."""
    rows = healthy_rows(seed)
    second = [dict(row) for row in rows[200:]]
    if sick:
        for row in second:
            row["train/batch"] = f"f{row['train/batch'][1:]}"
    return resumed(folder, rows[:230], second, 200)


def worse_after_resume(folder: Path, seed: int, sick: bool) -> Run:
    rows = healthy_rows(seed)
    second = [dict(row) for row in rows[300:]]
    if sick:
        for row in second:
            row["train/loss"] += 4.0 * np.exp(-(row["train/global_step"] - 300) / 80)
    return resumed(folder, rows[:300], second, 300)


def tracker_rows(folder: Path, seed: int, sick: bool) -> Run:
    rows = healthy_rows(seed)
    return resumed(folder, rows[: 250 if sick else 200], rows[200:], 200)


def updates_lost(folder: Path, seed: int, sick: bool) -> Run:
    random = rng(seed + 100)
    rows = changed(
        healthy_rows(seed),
        health__update_lost_pct=lambda step, _: random.uniform(80, 95) if sick else random.uniform(0, 40),
    )
    return write(folder, rows)


def lr_too_high(folder: Path, seed: int, sick: bool) -> Run:
    """Gradients point against each other; the twin's cosine is noise around 0."""
    random = rng(seed + 100)
    rows = changed(
        healthy_rows(seed), health__grad_cosine_sim=lambda step, _: random.normal(-0.4 if sick else 0.0, 0.15)
    )
    return write(folder, rows)


def lr_too_high_diverging(folder: Path, seed: int, sick: bool) -> Run:
    """Without the cosine: norms grow and the loss rises. In the twin norms grow while the loss falls."""
    rows = changed(
        healthy_rows(seed),
        health__grad_cosine_sim=lambda step, _: None,
        train__grad_norm_raw=lambda step, old: old * np.exp(max(step - 250, 0) / 120),
        train__loss=lambda step, old: old * (1 + (max(step - 250, 0) / 150 if sick else 0)),
    )
    return write(folder, rows)


def lr_too_high_climbing(folder: Path, seed: int, sick: bool) -> Run:
    """After the warm-up the loss is far above its first values, then falls with the learning rate.

    The twin's data gets harder, which no gradient shows.
    """

    def bump(step: int) -> float:
        return float(np.exp(-(((step - 60) / 40) ** 2)))

    rows = changed(
        healthy_rows(seed),
        train__loss=lambda step, old: old * (1 + (2 if sick else 1) * bump(step)),
        train__grad_norm_raw=lambda step, old: old * (1 + (20 if sick else 0) * bump(step)),
    )
    return write(folder, rows)


def data_quality(folder: Path, seed: int, sick: bool) -> Run:
    """Three in a hundred batches are foreign; the twin's losses are only heavy-tailed."""
    random = rng(seed + 100)

    def loss(step: int, old: float) -> float:
        if sick and random.random() < 0.03:
            return old * 4
        return old * float(np.exp(0.05 * random.standard_t(4)))

    return write(folder, changed(healthy_rows(seed), train__loss=loss))


def data_quality_events(folder: Path, seed: int, sick: bool) -> Run:
    """By the record's events; the twin's were run again after a resume or there were none."""
    spikes = [event("loss_spike", step, value=6.0, baseline=1.0) for step in (120, 240, 310, 500)]
    return write(folder, healthy_rows(seed), spikes if sick else [])


def loss_spike(folder: Path, seed: int, sick: bool) -> Run:
    spikes = [
        event("loss_spike", 240, value=6.0, baseline=1.0),
        event("loss_recovered", 241, "info", since=240),
        event("gradient_spike", 240, layer="head"),
    ]
    return write(folder, healthy_rows(seed), spikes if sick else [])


def nonfinite(folder: Path, seed: int, sick: bool) -> Run:
    rows = healthy_rows(seed)
    if not sick:
        return write(folder, rows)
    rows[500] |= {"train/loss": float("inf"), "train/grad_norm_raw": float("nan")}
    found = event("nonfinite", 501, "critical", source="loss and gradients", layers=["blocks.0", "head"])
    return write(folder, rows, [found, event("nonfinite_cleared", 520, "info", since=501)])


def nan_hidden(folder: Path, seed: int, sick: bool) -> Run:
    """The norm is NaN to the end, the loss stays clean; the twin has two such batches, which were skipped."""
    last = 601 if sick else 502
    rows = changed(
        healthy_rows(seed),
        train__grad_norm_raw=lambda step, old: float("nan") if 500 <= step < last else old,
        train__grad_norm=lambda step, old: float("nan") if 500 <= step < last else old,
    )
    return write(folder, rows)


def nan_hidden_event(folder: Path, seed: int, sick: bool) -> Run:
    """By the record's events, where rows hold no norm."""
    rows = changed(
        healthy_rows(seed),
        train__grad_norm_raw=lambda step, old: None,
        train__grad_norm=lambda step, old: None,
    )
    found = [event("nonfinite", 400, "critical", source="gradients", layers=["head"])]
    cleared = [event("nonfinite_cleared", 420, "info", since=400)]
    return write(folder, rows, found if sick else found + cleared)


def zero_loss_nan_norm(folder: Path, seed: int, sick: bool) -> Run:
    """The twin's norm is not finite either, and its loss says so."""
    rows = changed(
        healthy_rows(seed),
        train__grad_norm=lambda step, old: float("nan") if step >= 450 else old,
        train__grad_norm_raw=lambda step, old: float("nan") if step >= 450 else old,
        train__loss=lambda step, old: (0.0 if sick else float("nan")) if step >= 450 else old,
    )
    return write(folder, rows)


def layer_imbalance(folder: Path, seed: int, sick: bool) -> Run:
    """The twin's block stands out in one look of six, and its head always does, being of another kind."""
    rows = healthy_rows(seed)
    for row in rows:
        for metric in ("health/gw_ratio", "health/update_ratio"):
            key = f"{metric}/{BLOCKS[3]}"
            if key in row and (sick or row["train/global_step"] == 300):
                row[key] *= 80
    return write(folder, rows)


def representation_collapse(folder: Path, seed: int, sick: bool) -> Run:
    """The twin's matrix came with its low rank."""
    layer = "health/stable_rank/blocks.0"
    told = {"diagnosis": "stable_rank", "metric": layer, "layer": "blocks.0", "value": 2.1, "limit": 3.0}
    rows = healthy_rows(seed)
    for row in rows:
        if "health/stable_rank_min" in row:
            row[layer] = row["health/stable_rank_min"] = 2.1
    found = event("bound_crossed", 300, **told) if sick else event("bound_at_start", 1, "info", **told)
    return write(folder, rows, [found])


def representation_collapse_numbers(folder: Path, seed: int, sick: bool) -> Run:
    """From the numbers alone, as another tool's log has them; the twin was low before training."""
    rows = changed(
        healthy_rows(seed),
        health__stable_rank_min=lambda step, _: max(9.0 - step / 70, 1.5) if sick else 2.5,
    )
    return write(folder, rows)


def forgetting(folder: Path, seed: int, sick: bool) -> Run:
    """The twin starts from random weights, where drift is ordinary."""
    values = {f"health/weight_drift/blocks.{number}": 0.7 + number / 10 for number in range(6)}
    rows = healthy_rows(seed)
    for row in rows:
        if "health/weight_drift_max" in row:
            row |= values
            row["health/weight_drift_max"] = 1.2
    found = event("bound_crossed", 300, diagnosis="weight_drift", values=values, limit=0.5, ordinary=not sick)
    return write(folder, rows, [found])


def forgetting_numbers(folder: Path, seed: int, sick: bool) -> Run:
    rows = changed(
        healthy_rows(seed), health__weight_drift_max=lambda step, old: (1.5 if sick else 0.6) * step / 1000
    )
    return write(folder, rows)


def _evaluated(folder: Path, seed: int, **rises: bool) -> Run:
    """Evaluations that rise after step 240, or do not."""
    random = rng(seed + 100)

    def make(up: bool) -> Callable[[int, Any], float]:
        def loss(step: int, _: Any) -> float:
            late = 0.12 * max(step - 240, 0) / 60 if up else -0.02 * step / 60
            return 1.4 + np.exp(-step / 60) + late + random.normal(0, 0.01)

        return loss

    return write(folder, changed(healthy_rows(seed), **{name: make(up) for name, up in rises.items()}))


def overfitting(folder: Path, seed: int, sick: bool) -> Run:
    names = ("eval__loss", "eval__code__loss", "eval__chat__loss")
    return _evaluated(folder, seed, **dict.fromkeys(names, sick))


def source_overfitting(folder: Path, seed: int, sick: bool) -> Run:
    return _evaluated(folder, seed, eval__code__loss=sick, eval__chat__loss=False)


def entropy_collapse(folder: Path, seed: int, sick: bool) -> Run:
    """The twin's entropy is as low, but was so from the start."""
    random = rng(seed + 100)
    rows = changed(
        healthy_rows(seed),
        health__output_entropy=lambda step, _: (
            (2.4 - 2 * step / 600 if sick else 0.6) + random.normal(0, 0.05)
        ),
    )
    return write(folder, rows)


def lr_too_low(folder: Path, seed: int, sick: bool) -> Run:
    """The twin falls by a tenth."""
    random = rng(seed + 100)
    rows = changed(
        healthy_rows(seed),
        train__loss=lambda step, _: (2.0 if sick else 2.0 - 0.2 * step / 600) * random.lognormal(0, 0.03),
        eval__loss=lambda step, _: 2.0 if sick else 2.0 - 0.2 * step / 600,
    )
    return write(folder, rows)


def memory_pressure(folder: Path, seed: int, sick: bool) -> Run:
    rows = changed(
        healthy_rows(seed),
        health__cuda_utilization_pct=lambda step, _: 97.0 if sick else (97.0 if step == 300 else 90.0),
    )
    return write(folder, rows)


def memory_ran_out(folder: Path, seed: int, sick: bool) -> Run:
    error = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" if sick else "ValueError: no"
    return write(folder, healthy_rows(seed), end={"reason": "exception", "error": error})


def slow_throughput(folder: Path, seed: int, sick: bool) -> Run:
    """Steps that stall; the twin's long steps have as many more tokens."""
    random = rng(seed + 100)
    rows = healthy_rows(seed)
    for row in rows:
        if random.random() < 0.05:
            row["train/step_time_s"] *= 12
            if sick:
                row["train/tokens_per_sec"] /= 12
    return write(folder, rows)


def slower_and_slower(folder: Path, seed: int, sick: bool) -> Run:
    rows = changed(
        healthy_rows(seed),
        train__tokens_per_sec=lambda step, old: old * (1 - 0.6 * step / 600 if sick else 1),
    )
    return write(folder, rows)


def idle_device(folder: Path, seed: int, sick: bool) -> Run:
    rows = changed(healthy_rows(seed), train__mfu=lambda step, old: old / (10 if sick else 2))
    return write(folder, rows)


def packed_pair(folder: Path, seed: int, sick: bool) -> tuple[Run, Run]:
    """A packed run and an unpacked one on the same data; sick, packed samples see their neighbours."""
    unpacked = write(folder / "unpacked", healthy_rows(seed))
    rows = changed(healthy_rows(seed), train__loss=lambda step, old: old * (0.9 if sick else 1.0))
    random = rng(seed + 100)
    rows = changed(rows, train__loss=lambda step, old: old * random.lognormal(0, 0.02))
    return write(folder / "packed", rows), unpacked


BUILDERS: tuple[tuple[str, Builder], ...] = (
    ("run.replicas_diverge", replicas_diverge),
    ("run.no_zero_grad", no_zero_grad),
    ("run.no_loss_tokens", no_loss_tokens),
    ("run.no_loss_tokens", no_loss_tokens_counted),
    ("run.lr_schedule", lr_schedule),
    ("run.lr_schedule", lr_schedule_back),
    ("run.data_after_resume", data_after_resume),
    ("run.data_after_resume", data_changed_by_resume),
    ("run.worse_after_resume", worse_after_resume),
    ("run.updates_lost", updates_lost),
    ("run.lr_too_high", lr_too_high),
    ("run.lr_too_high", lr_too_high_diverging),
    ("run.lr_too_high", lr_too_high_climbing),
    ("run.data_quality", data_quality),
    ("run.data_quality", data_quality_events),
    ("run.loss_spike", loss_spike),
    ("run.nonfinite", nonfinite),
    ("run.nan_hidden", nan_hidden),
    ("run.nan_hidden", nan_hidden_event),
    ("run.zero_loss_nan_norm", zero_loss_nan_norm),
    ("run.layer_imbalance", layer_imbalance),
    ("run.representation_collapse", representation_collapse),
    ("run.representation_collapse", representation_collapse_numbers),
    ("run.forgetting", forgetting),
    ("run.forgetting", forgetting_numbers),
    ("run.source_overfitting", source_overfitting),
    ("run.overfitting", overfitting),
    ("run.entropy_collapse", entropy_collapse),
    ("run.lr_too_low", lr_too_low),
    ("run.memory_pressure", memory_pressure),
    ("run.memory_pressure", memory_ran_out),
    ("run.slow_throughput", slow_throughput),
    ("run.slow_throughput", slower_and_slower),
    ("run.slow_throughput", idle_device),
    ("run.tracker_rows", tracker_rows),
)
