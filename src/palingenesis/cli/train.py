"""``pgs train --config FILE``: the reference fine-tuning run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from palingenesis.cli.codes import FOUND, OK
from palingenesis.cli.output import print_json, say
from palingenesis.cli.overrides import overrides


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Option("--config", help="The configuration, a YAML file.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
) -> int:
    """Fine-tune a model as a configuration says, and watch it.

    Any option of the configuration can be set here: --train.learning_rate 1e-5.

    Exit code 0: the run is HEALTHY, 1: it is anything else, 2: it could not begin. Of several processes each
    exits with 0 where one would with 1: launchers take anything else for a crash, and may start all over.
    """
    from palingenesis.record.format import REPORT_FILE
    from palingenesis.record.verdict import HEALTHY
    from palingenesis.sft.config import load_config

    settings = load_config(config, overrides(context))
    from palingenesis.sft.run import leave_together
    from palingenesis.sft.run import train as run

    done = run(settings)
    leave_together()
    report = done.folder / REPORT_FILE
    if not done.main:
        return OK
    if json:
        print_json(
            {
                "run": str(done.folder),
                "verdict": done.verdict,
                "sentence": done.verdict_sentence,
                "steps": done.steps,
                "train_loss": done.loss,
                "eval_loss": done.eval_loss,
                "best_checkpoint": None if done.best_checkpoint is None else str(done.best_checkpoint),
                "report": str(report),
            }
        )
    else:
        say(f"{done.verdict}: {done.verdict_sentence}")
        if done.loss is not None:
            best = "" if done.eval_loss is None else f", best eval loss {done.eval_loss:.4f}"
            say(f"{done.steps} steps, loss {done.loss:.4f}{best}")
        say(f"model: {done.folder / 'model'}")
        say(f"report: {report}")
    return OK if done.verdict == HEALTHY or done.processes > 1 else FOUND
