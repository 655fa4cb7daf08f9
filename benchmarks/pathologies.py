"""How often a pathology is found where it is, and where it is not; in records and in other trainers' logs.

    python benchmarks/pathologies.py [--seeds 5]

Sick runs and healthy twins (tests/findings/runs.py, more_runs.py), written through the real writer, then as
the logs of other trainers and read back. Beside them runs of other causes that look much the same (below),
which only what is less than certain should fall for: the last table compares the confidence that findings
state with how often they were right, among sick records and look-alikes.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.findings.foreign import WRITERS, write_as
from tests.findings.more_runs import ALL
from tests.findings.runs import changed, healthy_rows, rng, write

from palingenesis.findings import Finding
from palingenesis.findings.pathologies import pathologies_of
from palingenesis.record.reader import Run
from palingenesis.runlogs.read import read_log
from palingenesis.runlogs.table import RunLog

LookAlike = Callable[[Path, int], Run]
#: What a sick run rightly shows besides the pathology that it was made for.
ALSO = {
    "run.no_loss_tokens": {"run.nonfinite"},
    "run.nan_hidden": {"run.nonfinite"},
    # Without a norm, torchtitan's line here says 0.
    "run.zero_loss_nan_norm": {"run.nonfinite", "run.no_loss_tokens"},
    "run.worse_after_resume": {"run.lr_too_high", "run.loss_spike"},
    "run.source_overfitting": {"run.overfitting"},
    "run.loss_spike": {"run.layer_exploding"},
}
#: Twins whose own fault is another one.
OTHERS = {
    "nan_hidden": {"run.nonfinite"},
    "nan_hidden_event": {"run.nonfinite"},
    "zero_loss_nan_norm": {"run.nonfinite"},
    "layer_stopped": {"run.layer_vanishing"},
    "layer_vanishing": {"run.layer_stopped"},
    "data_quality": {"run.loss_spike"},  # now and then the heavy tail makes one
    "data_changed_by_resume": {"run.tracker_rows"},
    "memory_ran_out": {"run.failed"},
    "forgetting": {"run.forgetting"},  # in a log that does not say that the weights were random
}


# -- runs that look like something else ---------------------------------------------------------------------


def harder_data(folder: Path, seed: int) -> Run:
    """A curriculum: the loss doubles and more when the hard part begins, and the gradient does not."""
    return write(
        folder, changed(healthy_rows(seed), train__loss=lambda step, old: old * (1 if step < 60 else 4))
    )


def nothing_to_learn(folder: Path, seed: int) -> Run:
    """A model that has learned all that there is: flat, and no learning rate would change it."""
    random = rng(seed + 200)
    rows = changed(
        healthy_rows(seed),
        train__loss=lambda step, _: 1.2 * random.lognormal(0, 0.05),
        eval__loss=lambda step, _: None,
    )
    return write(folder, rows)


def planned_tail(folder: Path, seed: int) -> Run:
    """A cosine down to a tenth of the peak at 80% of the run, and constant from there, as it was meant."""

    def rate(step: int, _: float) -> float:
        return 2e-6 + 9e-6 * (1 + np.cos(np.pi * min(step / 480, 1)))

    return write(folder, changed(healthy_rows(seed), train__lr=rate))


def two_difficulties(folder: Path, seed: int) -> Run:
    """One batch in thirty comes from a source that is simply harder."""
    random = rng(seed + 200)
    rows = changed(
        healthy_rows(seed), train__loss=lambda step, old: old * (2.6 if random.random() < 1 / 30 else 1)
    )
    return write(folder, rows)


def noisy_gradients(folder: Path, seed: int) -> Run:
    """Batches so small that consecutive gradients have nothing in common."""
    random = rng(seed + 200)
    return write(
        folder, changed(healthy_rows(seed), health__grad_cosine_sim=lambda step, _: random.normal(-0.01, 0.1))
    )


def random_weights(folder: Path, seed: int) -> Run:
    """Trained from random weights: everything drifts, and nothing is forgotten."""
    rows = changed(
        healthy_rows(seed),
        train__loss=lambda step, old: old + 6 * np.exp(-step / 100),
        health__weight_drift_max=lambda step, _: 1.5 * step / 600,
    )
    return write(folder, rows)


def other_evaluation(folder: Path, seed: int) -> Run:
    """A source with rows unlike the training rows: its loss rises a little for ever, from the first step."""
    random = rng(seed + 200)
    rows = changed(
        healthy_rows(seed), eval__chat__loss=lambda step, _: 2.0 + step / 4000 + random.normal(0, 0.004)
    )
    return write(folder, rows)


LOOK_ALIKES: tuple[LookAlike, ...] = (
    harder_data,
    nothing_to_learn,
    planned_tail,
    two_difficulties,
    noisy_gradients,
    random_weights,
    other_evaluation,
)


# -- measuring ----------------------------------------------------------------------------------------------


def findings_in(source: Run | RunLog) -> list[Finding]:
    return pathologies_of(source)


def read_as(form: str, run: Run, folder: Path) -> Run | RunLog:
    return run if form == "record" else read_log(write_as(form, run, folder / "as_log"))


def pairs(form: str, seeds: int, folder: Path) -> Iterator[tuple[str, str, list[Finding], list[Finding]]]:
    """Check, builder, what the sick run shows and what its twin does."""
    for check, builder in ALL:
        for seed in range(10, 10 + seeds):
            shown = []
            for sick in (True, False):
                with tempfile.TemporaryDirectory(dir=folder) as name:
                    run = builder(Path(name) / "run", seed, sick)
                    shown.append(findings_in(read_as(form, run, Path(name))))
            yield check, builder.__name__, shown[0], shown[1]


def table_of(form: str, seeds: int, folder: Path, stated: dict[float, list[bool]]) -> None:
    found: dict[tuple[str, str], list[bool]] = collections.defaultdict(list)
    false: collections.Counter[str] = collections.Counter()
    count = 0
    for check, builder, sick, twin in pairs(form, seeds, folder):
        right = {check} | ALSO.get(check, set())
        found[check, builder].append(any(one.check == check for one in sick))
        others = OTHERS.get(builder, set())
        wrong = [one.check for one in sick if one.check not in right | others]
        wrong += [one.check for one in twin if one.check not in others]
        false.update(wrong)
        count += 2
        if form == "record":
            for one in sick:
                if one.check == check and one.confidence is not None:
                    stated[one.confidence].append(True)
    # A form that has not the numbers of a case never shows it.
    able = {case: each for case, each in found.items() if any(each)}
    hits, tries = sum(map(sum, able.values())), sum(map(len, able.values()))
    print(
        f"{form:20s} {len({check for check, _ in able}):2d} of {len({check for check, _ in found})} "
        f"pathologies ({len(able)} of {len(found)} cases) show; there found {hits} of {tries}; "
        f"false findings {sum(false.values())} in {count} runs {dict(false) or ''}"
    )
    for (check, builder), each in sorted(found.items()):
        if form == "record" and not all(each):
            print(f"    {check} ({builder}): {sum(each)} of {len(each)}")


def look_alikes(seeds: int, folder: Path, stated: dict[float, list[bool]]) -> None:
    print("\nlook-alikes: what they were taken for")
    for make in LOOK_ALIKES:
        taken: collections.Counter[str] = collections.Counter()
        for seed in range(10, 10 + seeds):
            with tempfile.TemporaryDirectory(dir=folder) as name:
                for one in findings_in(make(Path(name) / "run", seed)):
                    taken[f"{one.check} ({one.confidence:.0%})"] += 1
                    if one.confidence is not None:
                        stated[one.confidence].append(False)
        print(f"    {make.__name__:20s} {dict(taken) or 'nothing'}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    stated: dict[float, list[bool]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        for form in ("record", *WRITERS):
            table_of(form, seeds, Path(name), stated)
        look_alikes(seeds, Path(name), stated)
    print("\nstated confidence, and how often findings that state it were right (records)")
    for confidence, outcomes in sorted(stated.items()):
        print(f"    {confidence:4.0%}  {sum(outcomes):4d} of {len(outcomes):4d}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
