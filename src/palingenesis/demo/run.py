"""run_demo: the same training run twice, once healthy and once with a layer broken half-way."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from palingenesis.demo.corpus import require
from palingenesis.demo.display import Display
from palingenesis.demo.faults import PlannedFault
from palingenesis.demo.options import BROKEN_LAYER, DEFAULT_SEED, DEFAULT_STEPS, Fault, check_options
from palingenesis.demo.result import DemoResult
from palingenesis.demo.training import prepare_text, train
from palingenesis.errors import RecordExistsError
from palingenesis.record.format import RUN_FILE

RUN_NAMES = {"healthy": "pgs demo: healthy", "faulty": "pgs demo: faulty"}
NEEDED = ("yaml", "chatterbot_corpus", "tokenizers", "transformers")


def run_demo(
    out: Path,
    *,
    steps: int = DEFAULT_STEPS,
    seed: int = DEFAULT_SEED,
    fault: Fault = "no_gradient",
    console: Console | None = None,
) -> DemoResult:
    """Train twice from the same seed, ``out/healthy`` and ``out/faulty``, and compare what was seen.

    Records of an earlier demonstration in ``out`` are replaced. With ``fault="none"`` there is only the
    healthy run. Without a ``console`` nothing is shown.

    Raises:
        ConfigError: too few steps, or an unknown fault.
        MissingExtraError: the extra ``demo`` is not installed.
        RecordExistsError: ``out`` holds a run that is not a demonstration's.
    """
    check_options(steps, fault)
    out = Path(out)
    for part, name in RUN_NAMES.items():
        _refuse_other_runs(out / part, name)
    display = Display(console or Console(quiet=True), steps)
    display.line("Reading conversations from chatterbot-corpus and training a tokenizer on them ...")
    for module in NEEDED:
        require(module)
    text = prepare_text()

    with display.run(f"Healthy run: {steps} steps"):
        healthy = train(
            text,
            out / "healthy",
            name=RUN_NAMES["healthy"],
            steps=steps,
            seed=seed,
            planned=None,
            on_step=display.step,
        )
    planned = PlannedFault(fault, BROKEN_LAYER, after_step=steps // 2)
    faulty = None
    if fault != "none":
        with display.run(f"The same run, broken half-way: {steps} steps", planned=planned):
            faulty = train(
                text,
                out / "faulty",
                name=RUN_NAMES["faulty"],
                steps=steps,
                seed=seed,
                planned=planned,
                on_step=display.step,
            )

    result = DemoResult(steps, seed, fault, planned.after_step, planned.layer, healthy, faulty)
    display.closing(result)
    return result


def _refuse_other_runs(folder: Path, name: str) -> None:
    """The demonstration may replace its own records, and nobody else's."""
    info = folder / RUN_FILE
    if not info.exists():
        return
    try:
        found = json.loads(info.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("name") != name:
        raise RecordExistsError(f"{folder} holds a run that is not a demonstration's; choose another folder")
