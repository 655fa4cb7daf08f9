"""``pgs diagnose``: everything that can be checked, before a run or after it, in one command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from palingenesis.cli.options import ConfigFile, DataFile, Gpu, GpuMemory, Json, ModelFolder, WorldSize
from palingenesis.cli.output import print_json
from palingenesis.cli.overrides import overrides

if TYPE_CHECKING:
    from rich.console import Console

    from palingenesis.findings import Report

_GB = 10**9


def diagnose(
    context: typer.Context,
    mode: Annotated[
        Literal["pre", "full", "post"],
        typer.Option(help="pre: look; full: do a few real steps as well; post: read a run that is over."),
    ] = "pre",
    config: ConfigFile = None,
    model: ModelFolder = None,
    data: DataFile = None,
    log_file: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="For --mode post: a run folder, any trainer's log, or - for stdin."),
    ] = None,
    gpu_memory_gb: GpuMemory = None,
    gpu: Gpu = None,
    world_size: WorldSize = 1,
    num_samples: Annotated[int, typer.Option(min=1, help="Rows whose masks are checked.")] = 50,
    json: Json = False,
) -> int:
    """Check masks, data, memory, configuration and tokenizer before a run, or read one that is over.

    Give --config FILE, with --section.key VALUE for any of its options, or --model DIR --data FILE; with
    --mode post give --log_file.

    Exit code 0: nothing that needs action, 1: something, 2: there is nothing that can be checked.
    """
    from palingenesis.errors import ConfigError

    given = overrides(context)
    if mode == "post":
        if config is not None or model is not None or data is not None or given:
            raise ConfigError(
                "--mode post looks at a run that is over: give --log_file RUN, and no configuration"
            )
        report = _after(log_file)
    else:
        if log_file is not None:
            raise ConfigError(f"--log_file belongs to --mode post, and the mode is {mode}: leave one out")
        from palingenesis.preflight.diagnose import diagnose as check
        from palingenesis.preflight.target import target_of

        card = _card(gpu, gpu_memory_gb)
        settings = target_of(config, given, model, data)
        report = check(settings, mode=mode, gpu_bytes=card, world_size=world_size, num_samples=num_samples)
    from palingenesis.findings.render import print_findings, to_json

    if json:
        print_json(to_json(report))
        return report.code
    from rich.console import Console

    console = Console()
    _show(report, console)
    print_findings(report, console)
    return report.code


def _after(log_file: str | None) -> Report:
    from palingenesis.errors import ConfigError
    from palingenesis.preflight.diagnose import diagnose_log

    if log_file is None:
        raise ConfigError(
            "--mode post looks at a run that is over: give its folder or log with --log_file RUN"
        )
    return diagnose_log(log_file)


def _card(gpu: str | None, gpu_memory_gb: float | None) -> int | None:
    from palingenesis.errors import ConfigError
    from palingenesis.preflight.memory.gpus import gpu_memory

    if gpu is not None and gpu_memory_gb is not None:
        raise ConfigError("--gpu and --gpu_memory_gb were both given: leave one out")
    if gpu is not None:
        return gpu_memory(gpu)
    return None if gpu_memory_gb is None else int(gpu_memory_gb * _GB)


def _show(report: Report, console: Console) -> None:
    """What was looked at, and what was not."""
    for line in _lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(report: Report) -> list[str]:
    facts = report.facts
    if facts["mode"] == "post":
        from palingenesis.findings.whole import facts_in_words

        return facts_in_words(facts)
    lines = [f"checked: {', '.join(facts['checked'])}"]
    if facts["not_checked"]:
        lines.append(f"not checked: {'; '.join(facts['not_checked'])}")
    if "model" in facts:
        model = facts["model"]
        lines.append(
            f"model: {model['class']}, {model['parameters']} parameters, {model['trained']} of adapters"
        )
        if model["trained"] == model["parameters"]:
            lines[-1] = f"model: {model['class']}, {model['parameters']} parameters, all of them trained"
    if facts["steps"] is not None:
        from palingenesis.preflight.words import counted

        rows = "" if facts["rows"] is None else f" over about {counted(facts['rows'], 'row')} an epoch"
        lines.append(f"run: {counted(facts['steps'], 'optimizer step')}{rows}")
    if "memory" in facts:
        memory = facts["memory"]
        lines.append(
            f"memory: {memory['total_bytes'] / _GB:.2f} GB on a GPU, {memory['peak_bytes'] / _GB:.2f} in use"
        )
    if "first_steps" in facts:
        lines += _steps(facts["first_steps"])
    return lines


def _steps(facts: dict[str, object]) -> list[str]:
    lines = []
    loss, overfit = facts.get("first_loss"), facts.get("overfit_losses")
    if isinstance(loss, dict):
        lines.append(
            f"first loss: {loss['training']:.4f} (from whole logits {loss['independent']:.4f}, by chance "
            f"{loss['ln_vocabulary']:.2f})"
        )
    if isinstance(overfit, list):
        lines.append(
            f"overfit of the same samples: {overfit[0]:.4f} to {overfit[-1]:.4f} in {len(overfit) - 1} steps"
        )
    speed = facts.get("tokens_per_second")
    if isinstance(speed, float):
        lines.append(f"speed: {speed:.0f} tokens a second on {facts['device']}")
    return lines
