"""``pgs profile``: the memory of one optimizer step, and whether a card has it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palingenesis.cli.options import Gpu, GpuMemory, Json, WorldSize
from palingenesis.cli.output import print_json, say
from palingenesis.cli.overrides import overrides

if TYPE_CHECKING:
    from rich.console import Console

    from palingenesis.preflight.memory.changes import Tried
    from palingenesis.preflight.memory.estimate import Fit
    from palingenesis.preflight.memory.limits import Limit

_GB = 10**9
_WIDEST, _NARROWEST, _BAR = 100, 30, 30
_PHASES = {
    "FORWARD": "the forward pass",
    "LOSS": "the LM head and the loss",
    "BACKWARD": "the backward pass",
    "CLIPPING": "clipping",
    "OPTIMIZER": "the optimizer's step",
}


def profile(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The configuration.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="A model's folder (config.json is enough), in place of --config."),
    ] = None,
    gpu_memory_gb: GpuMemory = None,
    gpu: Gpu = None,
    world_size: WorldSize = 1,
    search_seconds: Annotated[
        float,
        typer.Option(
            metavar="S", help="Time for what would make it fit and for the largest that fits; 0: none.", min=0
        ),
    ] = 40,
    json: Json = False,
) -> int:
    """Estimate the memory of one optimizer step, without weights and without a GPU.

    With --gpu_memory_gb or --gpu: whether it fits, what would make it fit, and how far batch and rows can go.
    Any option of the configuration can be set here: --train.per_device_batch_size 4.

    Exit code 0: it fits (or no card was given), 1: it does not or only just, 2: bad input.
    """
    from palingenesis.errors import ConfigError
    from palingenesis.preflight.memory.gpus import gpu_memory
    from palingenesis.preflight.target import target_of

    if gpu is not None and gpu_memory_gb is not None:
        raise ConfigError("--gpu and --gpu_memory_gb were both given: leave one out")
    settings = target_of(config, overrides(context), model, needs_data=False)
    card = None if gpu_memory_gb is None else int(gpu_memory_gb * _GB)
    card = card if gpu is None else gpu_memory(gpu)
    from palingenesis.findings import Report
    from palingenesis.findings.render import print_findings, to_json
    from palingenesis.preflight.memory import estimate_memory
    from palingenesis.preflight.memory.facts import facts_of
    from palingenesis.preflight.memory.findings import findings_of

    with _quiet():
        estimate = estimate_memory(settings, world_size=world_size)
        fit = estimate.on(card)
        found = _Found() if card is None else _search(fit, search_seconds)
    tried, limits = found.tried, found.limits
    facts = facts_of(fit, tried, limits, found.without, not_tried=found.left_out)
    report = Report("profile", findings_of(fit, tried, limits, found.without), facts)
    if json:
        print_json(to_json(report))
        return report.code
    console = _console()
    _show(fit, found, console)
    print_findings(report, console)
    return report.code


@dataclass
class _Found:
    """What was looked for beside the step itself."""

    tried: list[Tried] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    without: Fit | None = None
    left_out: list[str] = field(default_factory=list)


def _search(fit: Fit, seconds: float) -> _Found:
    """What would make it fit, where it does not; how far batch and rows can go, in the time that is left."""
    from palingenesis.preflight.memory.changes import Budget, what_would_fit, without_kernels
    from palingenesis.preflight.memory.limits import largest_batch, longest_rows

    budget = Budget(seconds)
    budget.took(fit.estimate.seconds / 2)  # the first was traced from its beginning
    found = _Found(left_out=budget.left_out if seconds else [])
    found.tried = [] if fit.fits else what_would_fit(fit, budget)
    found.without = without_kernels(fit, budget)
    found.limits = [find(fit, budget) for find in (largest_batch, longest_rows) if not budget.spent]
    return found


def _console() -> Console:
    import sys

    from rich.console import Console

    return Console(file=sys.stdout, highlight=False)


def _quiet() -> Any:
    """Other libraries' remarks are no part of the answer."""
    from palingenesis.preflight.memory.quiet import quiet

    return quiet()


# -- what is shown -----------------------------------------------------------------------------------------


def _show(fit: Fit, found: _Found, console: Console) -> None:
    from palingenesis.preflight.memory.findings import in_words
    from palingenesis.preflight.memory.picture import draw

    plain = not console.is_terminal
    estimate, use = fit.estimate, fit.estimate.use
    lines = [*_heading(fit), ""]
    for name, size in use.made_of.items():
        share = size / use.peak
        bar = ("#" if plain else "█") * round(share * _BAR)
        lines.append(f"{_row(name, size)} {100 * share:5.1f}%  {bar}")
    lines.append(f"{_row('peak of a step', use.peak)}         in {_PHASES[use.phase.name]}")
    lines.append(f"  LM head and loss alone take {in_words(use.loss_peak)} at their most")
    lines += ["", *draw(use, width=min(console.width, _WIDEST), plain=plain).lines, ""]
    lines += ["added to the peak:", *_margin(fit, console), ""]
    if found.tried:
        lines.append("what would make it fit, cheapest first, each traced:")
        for one in found.tried:
            verdict = "fits" if one.fits else "does not fit"
            lines.append(
                f"  {in_words(one.fit.total):>10}  {verdict:<12}  {one.change.words}  ({one.change.cost})"
            )
        lines.append("")
    if found.left_out:
        lines += [f"not tried, because --search_seconds was up: {', '.join(found.left_out)}", ""]
    if found.limits:
        lines += [f"  {_limit(limit)}" for limit in found.limits] + [""]
    lines += [f"traced in {estimate.seconds:.1f} s", ""]
    for line in lines:
        say(line.rstrip())


def _margin(fit: Fit, console: Console) -> list[str]:
    lines = []
    for part in fit.margin:
        first = f"{_row(part.name, part.bytes)}  "
        # A pipe gets every part on one line; a terminal gets its source broken where words end.
        width = max(_NARROWEST, min(console.width, _WIDEST) - len(first)) if console.is_terminal else None
        told = [part.source] if width is None else textwrap.wrap(part.source, width)
        lines += [first + told[0], *(" " * len(first) + more for more in told[1:])]
    lines.append(_row("needed in all", fit.total))
    if fit.gpu_bytes is None or fit.headroom is None:
        return [*lines, "  give --gpu_memory_gb or --gpu to hear whether that fits"]
    verdict = "fits" if fit.fits else "does not fit"
    return [
        *lines,
        _row("the card has", fit.gpu_bytes),
        f"{_row('headroom', fit.headroom)}  {verdict}{', with little to spare' if fit.tight else ''}",
    ]


def _row(name: str, size: float) -> str:
    from palingenesis.preflight.memory.findings import in_words

    return f"  {name:<18}{in_words(size):>12}"


def _heading(fit: Fit) -> list[str]:
    estimate = fit.estimate
    config = estimate.config
    sizes = estimate.sizes
    train, options = config.train, config.model
    trained = sizes.trained / max(sizes.all, 1)
    how = [
        options.torch_dtype,
        options.attn_implementation,
        train.optimizer,
        f"checkpointing {'on' if train.gradient_checkpointing else 'off'}",
        f"{config.memory.loss_num_chunks} chunks" if config.memory.chunked_loss else "whole logits",
    ]
    if options.lora is not None:
        how.append(f"LoRA of rank {options.lora.rank} ({100 * trained:.2g}% of the bytes trained)")
    ranks = (
        "" if estimate.world_size == 1 else f", {config.parallel.strategy} over {estimate.world_size} ranks"
    )
    rows = f"{train.per_device_batch_size} x {config.data.max_seq_length} tokens"
    packed = ", packed" if config.data.packing else ""
    return [
        f"{options.name_or_path} ({estimate.model}, {_count(estimate.parameters)} parameters)",
        f"{rows}{packed}, {train.gradient_accumulation_steps} micro-batches{ranks}; {', '.join(how)}",
    ]


def _limit(limit: Limit) -> str:
    if limit.largest is None:
        return f"no {limit.option} fits" if limit.exact else f"no {limit.option} was found that fits"
    if not limit.exact:
        return f"{limit.option} {limit.largest} fits (time was up; there may be more)"
    if limit.ended_by == "memory":
        return f"{limit.option} {limit.largest} is the largest that fits"
    return f"{limit.option} {limit.largest} fits: {limit.ended_by}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
