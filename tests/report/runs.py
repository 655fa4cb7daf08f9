"""Run folders for the report's tests: norms and losses go through the real watch into the real record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palingenesis.config import MonitorConfig
from palingenesis.events import Event
from palingenesis.record.writer import RecordWriter
from palingenesis.watch.layer_alarms import LayerWatch
from palingenesis.watch.loss import LossWatch
from palingenesis.watch.reading import CheckReading

Floats = NDArray[np.float64]


@dataclass
class Script:
    """What a made-up run went through."""

    names: Sequence[str]
    norms: Floats
    """``[checks, layers]``: NaN for a gradient of None, infinite for one that held a NaN."""
    losses: Sequence[float | None] = ()
    """One a step; None where no loss was given."""
    config: MonitorConfig = field(default_factory=lambda: MonitorConfig(check_every=10))
    extra: Sequence[Event] = ()
    info: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = field(default_factory=lambda: {"reason": "completed", "error": None})
    first_step: int = 1
    resume_from: int | None = None


def block_names(blocks: int) -> list[str]:
    """Names as a small transformer has them."""
    parts = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    inner = [f"model.layers.{block}.{part}" for block in range(blocks) for part in parts]
    return ["model.embed_tokens", *inner, "lm_head"]


def healthy_norms(checks: int, layers: int, seed: int = 0) -> Floats:
    """Norms that differ by orders of magnitude between layers, shrink a little, and are noisy."""
    rng = np.random.default_rng(seed)
    level = rng.uniform(-3, 0.5, layers)
    drift = -0.4 * np.linspace(0, 1, checks)[:, None]
    return np.asarray(10 ** (level + drift + 0.08 * rng.standard_normal((checks, layers))))


def falling_losses(steps: int, seed: int = 0) -> list[float | None]:
    rng = np.random.default_rng(seed)
    curve = 1.2 + 3.0 * np.exp(-np.arange(steps) / (steps / 4))
    return list(curve * np.exp(0.04 * rng.standard_normal(steps)))


def write_run(folder: Path, script: Script) -> Path:
    """Write the run and return its folder."""
    config, names = script.config, list(script.names)
    info = {
        "name": "made-up run",
        "versions": {"palingenesis": "0.1.0", "torch": "2.13.0", "python": "3.11"},
        "model": {
            "class": "TinyLlama",
            "parameters": 4_200_000,
            "trainable": 4_200_000,
            "layers": len(names) + 1,
            "watched_layers": len(names),
        },
        "layers": names,
        "not_watched": [{"layer": "model.rotary_emb", "reason": "no trainable parameters"}],
        "optimizer": {"class": "AdamW", "groups": 1},
        "parallelism": {"world_size": 1, "rank": 0},
        "gradients": "raw",
        "config": config.model_dump(mode="json"),
        **script.info,
    }
    writer = RecordWriter(folder, info, resume=script.resume_from is not None)
    if script.resume_from is not None:
        writer.event(
            Event(
                "run_resumed",
                script.resume_from,
                "info",
                "the run goes on",
                {"from_step": script.resume_from},
            )
        )
    else:
        writer.event(
            Event(
                "run_started",
                0,
                "info",
                f"monitoring {len(names)} layers",
                {"record_version": 1, "name": "made-up run"},
            )
        )
    seen = _train(writer, script)
    if script.end is not None:
        _end(writer, script, seen)
    else:
        _kill(writer)
    return folder


def _train(writer: RecordWriter, script: Script) -> list[Event]:
    watch, loss_watch = LayerWatch(list(script.names), script.config), LossWatch(script.config)
    waiting, seen = sorted(script.extra, key=lambda e: e.step), []
    every = script.config.check_every
    steps = max(len(script.losses), len(script.norms) * every)
    recent: list[tuple[int, float]] = []
    for index in range(steps):
        step = script.first_step + index
        loss = script.losses[index] if index < len(script.losses) else None
        row: dict[str, Any] = {"train/global_step": step, "time": 1.7e9 + step, "train/lr": 1e-4}
        if loss is not None:
            row["train/loss"] = loss
            recent.append((step, loss))
        writer.metrics(row)
        events = []
        if (index + 1) % every == 0 and (index + 1) // every <= len(script.norms):
            norm = script.norms[(index + 1) // every - 1]
            absent = np.isnan(norm)
            events = watch.check(CheckReading.of_norms(step, np.where(absent, 0.0, norm), absent))
            events = [*loss_watch.check(recent, step), *events]
            recent = []
            written = [None if gone else float(value) for value, gone in zip(norm, absent, strict=True)]
            writer.check(step, watch.judged, list(script.names), written)
        while waiting and waiting[0].step <= step:
            events.append(waiting.pop(0))
        if events:
            seen.extend(writer.events(events))
    return seen


def _end(writer: RecordWriter, script: Script, seen: Sequence[Event]) -> None:
    assert script.end is not None
    every = script.config.check_every
    steps = script.first_step - 1 + max(len(script.losses), len(script.norms) * every)
    failed = script.end["reason"] == "exception"
    writer.event(
        Event(
            "run_ended",
            steps,
            "warning" if failed else "info",
            f"ended: {script.end['reason']}",
            {**script.end, "steps": steps},
        )
    )
    names = {
        "alarms": "alarm",
        "alarms_cleared": "alarm_cleared",
        "loss_spikes": "loss_spike",
        "nonfinite": "nonfinite",
        "skipped_steps": "skipped_step",
    }
    counts = {count: sum(e.event == kind for e in seen) for count, kind in names.items()}
    counts["checks"] = len(script.norms)
    counts["checks_without_gradients"] = int((np.nan_to_num(script.norms) == 0).all(axis=1).sum())
    writer.close({**script.end, "steps": steps, "counts": counts})


def _kill(writer: RecordWriter) -> None:
    """Leave the record as a killed process does: without an end, but for a test free to be read."""
    writer.flush()
    for file in writer._files:
        file.close()
    writer._lock.release()


# ---------------------------------------------------------------------------------------------- whole runs


def healthy(folder: Path) -> Path:
    names = block_names(4)
    return write_run(folder, Script(names, healthy_norms(60, len(names)), falling_losses(600)))


def faulty(folder: Path) -> Path:
    """The gradient of one block's MLP stops at step 310 and starves what lies before it; later a spike."""
    names = block_names(4)
    norms = healthy_norms(60, len(names))
    dead = names.index("model.layers.2.mlp.up_proj")
    norms[30:, dead] = 0.0
    norms[30:48, dead - 4 : dead] *= 2e-3
    norms[40:44, names.index("lm_head")] *= 400
    losses = falling_losses(600)
    losses[452] = 60.0
    losses[520:541] = [float("nan")] * 21
    extra = [
        Event(
            "nonfinite",
            521,
            "critical",
            "the loss became NaN at step 521",
            {"source": "loss", "layers": [], "value": "NaN", "between_checks": True},
        ),
        Event("nonfinite_cleared", 542, "info", "the loss is finite again", {"since": 521}),
        Event(
            "signal_unavailable",
            10,
            "info",
            "gradient norms of model.experts cannot be read",
            {
                "signal": "grad_norm",
                "reason": "its gradients are of a kind without a norm",
                "layers": ["model.experts"],
            },
        ),
    ]
    return write_run(folder, Script(names, norms, losses, extra=extra))


NASTY = (
    "<script>window.pwned=1;alert(1)</script>",
    "\"><img src=x onerror=window.pwned=1>'&amp;",
    "x" * 300,
    "{{ 7*7 }}{% raw %}",
    "\x1b[31mred\x1b[0m\nnewline\ttab",
    "right-to-left \u202e override",
    "step",
    "日本語の層" * 20,
)


def nasty(folder: Path) -> Path:
    """Layers, a run, reasons and messages called what nobody should call them; all of them alarm."""
    norms = healthy_norms(30, len(NASTY))
    norms[15:] *= np.array([[0.0, 1e-4, 1e4, np.nan, 0.0, 1e-5, 1e3, 1e-6]])
    extra = [
        Event("monitor_error", 120, "warning", f"cannot read {name}", {"error": name, "where": name})
        for name in NASTY
    ]
    info = {
        "name": NASTY[0],
        "not_watched": [{"layer": name, "reason": f"because {name}"} for name in NASTY],
        "model": {"class": NASTY[1]},
        "versions": {NASTY[0]: NASTY[1]},
    }
    config = MonitorConfig(check_every=10, common_mode=False)
    end = {"reason": "exception", "error": f"RuntimeError: {NASTY[0]}"}
    return write_run(folder, Script(NASTY, norms, falling_losses(300), config, extra, info, end))


def killed(folder: Path) -> Path:
    names = block_names(2)
    run = write_run(folder, Script(names, healthy_norms(20, len(names)), falling_losses(207), end=None))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"train/global_step":208,"tra')
    return run


def resumed(folder: Path) -> Path:
    """Killed at step 250 with a dead layer; resumed from step 200, where it was well, and well since."""
    names = block_names(2)
    norms = healthy_norms(25, len(names))
    norms[20:, 3] = 0.0
    write_run(folder, Script(names, norms, falling_losses(250), end=None))
    again = healthy_norms(30, len(names), seed=1)
    return write_run(folder, Script(names, again, falling_losses(300), first_step=201, resume_from=200))


def big(folder: Path, layers: int = 1000, checks: int = 2000) -> Path:
    """Many layers, many checks, some faults, one of them a single check long."""
    names = block_names(layers // 6 + 1)[:layers]
    norms = healthy_norms(checks, layers)
    norms[checks // 2 :, layers // 2] = 0.0
    norms[checks // 2 : checks // 2 + 60, layers // 2 - 40 : layers // 2] *= 1e-3
    norms[checks // 4, 5] *= 1e5
    norms[:, 17] = np.nan
    for layer in range(0, layers, 25):
        start = (layer * 37) % (checks - 40) + 20
        norms[start : start + 12, layer] *= 300
    config = MonitorConfig(check_every=5)
    return write_run(folder, Script(names, norms, falling_losses(checks * 5), config))


def warming_up(folder: Path) -> Path:
    names = block_names(1)
    return write_run(folder, Script(names, healthy_norms(4, len(names)), falling_losses(45)))


def bare(folder: Path) -> Path:
    """Ended before its first check, and no loss was ever given."""
    return write_run(folder, Script(["fc"], np.zeros((0, 1)), [None] * 3))


def one_layer(folder: Path) -> Path:
    """One layer, losses around zero with one far off, steps in the millions."""
    rng = np.random.default_rng(0)
    losses: list[float | None] = list(-0.2 + 0.1 * rng.standard_normal(400))
    losses[200] = 5e4
    script = Script(["fc"], healthy_norms(40, 1), losses, first_step=12_000_001)
    return write_run(folder, script)


def all_nan(folder: Path) -> Path:
    """Every loss and every gradient is NaN from the first step on."""
    names = block_names(1)
    extra = [
        Event(
            "nonfinite",
            1,
            "critical",
            "loss and gradients are NaN from the first step",
            {"source": "loss and gradients", "layers": names, "value": "NaN", "between_checks": True},
        )
    ]
    return write_run(
        folder, Script(names, np.full((20, len(names)), np.inf), [float("nan")] * 200, extra=extra)
    )


def not_monitored(folder: Path) -> Path:
    """step() was called before backward(): no check saw a gradient."""
    names = block_names(1)
    extra = [Event("no_gradients", 10, "warning", "no watched layer has a gradient", {"watched": len(names)})]
    return write_run(
        folder, Script(names, np.full((20, len(names)), np.nan), falling_losses(200), extra=extra)
    )


def one_bad_loss(folder: Path) -> Path:
    """One NaN among the losses, at a check, and a spike of one layer's gradient between two checks."""
    losses = falling_losses(200)
    losses[99] = float("nan")
    extra = [
        Event("gradient_spike", 55, "warning", "fc: gradient norm 30 at step 55, between two checks",
              {"layers": ["fc"], "layer": "fc", "value": 1.5, "baseline": 0.0, "ratio": 30.0}),
        Event("nonfinite", 100, "critical", "the loss is NaN",
              {"source": "loss", "layers": [], "value": "NaN", "between_checks": False}),
        Event("nonfinite_cleared", 110, "info", "finite again", {"since": 100}),
    ]  # fmt: skip
    return write_run(folder, Script(["fc"], healthy_norms(20, 1), losses, extra=extra))


def accepted(folder: Path) -> Path:
    """A layer rises for good, which is accepted, and one for a while; parameters in no optimizer; a last
    check that nothing confirms."""
    names = block_names(2)
    norms = healthy_norms(60, len(names))
    norms[20:, names.index("model.layers.0.mlp.up_proj")] *= 30
    norms[30:36, names.index("model.layers.1.mlp.up_proj")] /= 300
    strays = [f"model.layers.{n}.norm.weight" for n in range(8)]
    late = {"lm_head": "vanishing", "model.embed_tokens": "exploding"}
    extra = [
        Event("not_optimized", 0, "warning", "no optimizer holds 8 parameters", {"parameters": strays}),
        Event("unconfirmed", 600, "warning", "at the last check lm_head (vanishing) and 1 more layers left "
              "the normal range; the run ended before a second check could confirm it",
              {"layers": list(late), "diagnoses": late, "value": None}),
    ]  # fmt: skip
    return write_run(folder, Script(names, norms, falling_losses(600), extra=extra))
