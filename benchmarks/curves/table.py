"""How often ``pgs loss`` sees what is wrong with a curve, and how often what is not there.

    python benchmarks/curves/table.py [--healthy 500] [--faulty 100] [--json FILE]

Healthy curves of many noises, schedules, shapes and lengths: every finding is a false one, except a
levelled-off loss whose clean curve has levelled off, and a first loss that is a guess's. Then curves with
each fault: whether it is found, at its place, and what else is told of them that is not there. ``made.py``
says how curves are made and how large a fault has to be.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from pathlib import Path

import numpy as np
from made import FAULTS, Made, faulty, healthy

from palingenesis.findings.curve import CurveAnalysis, analyse, findings_of
from palingenesis.findings.pathologies import pathologies_of

#: Rows by which the place of a spike may be off, and the share of its length that a plateau may.
SPIKE_ROWS, OVERLAP = 12, 0.5
#: A loss has levelled off if the clean curve falls no more than this in that part, of all of its fall.
LEVEL = 0.06
#: What a fault is told as, where that is not its own name.
FINDS = {
    "slow rise": "diverged",
    "fast rise": "diverged",
    "jump": "diverged",
    "stall": "plateau",
    "early spike": "spikes",
    "NaN": "nonfinite",
    "period": "periodic",
    "restart": "restarted",
}
#: Beside these a loss may level off, by the clean curve.
GOES_ON = (None, "spikes", "early spike", "NaN", "period", "restart", "overfitting")


def seen(fault: str, made: Made, analysis: CurveAnalysis) -> tuple[int, int]:
    """Of how many planted faults how many were found."""
    truth, steps = made.truth, made.log.column("train/loss").step
    if fault in ("spikes", "early spike"):
        every = float(np.median(np.diff(steps)))
        left = [spike.step for spike in analysis.spikes]
        hits = 0
        for place in truth["spikes"]:
            near = [step for step in left if abs(step - place) <= SPIKE_ROWS * every]
            hits += bool(near)
            left = [step for step in left if step not in near[:1]]
        return hits, len(truth["spikes"])
    if fault in ("plateau", "stall"):
        first, last = truth["plateau"]
        told = [(one.first_step, one.last_step) for one in analysis.plateaus]
        if fault == "stall" and analysis.level is not None:
            told.append((analysis.level.since_step, last))
        return int(any(_overlap(one, (first, last)) > OVERLAP for one in told)), 1
    if fault == "period":
        return int(analysis.period is not None and abs(analysis.period.rows - truth["period"]) <= 1), 1
    if fault == "NaN":
        return int(analysis.nonfinite is not None and analysis.nonfinite.first_step == truth["nonfinite"]), 1
    if fault == "restart":
        return int(any(one.to_step == truth["restart"] for one in analysis.restarts)), 1
    if fault == "overfitting":
        return int(any(one.check == "run.overfitting" for one in pathologies_of(made.log))), 1
    return int(analysis.rise is not None), 1


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    common = min(one[1], other[1]) - max(one[0], other[0])
    return common / (max(one[1], other[1]) - min(one[0], other[0]))


def wrong(fault: str | None, made: Made, analysis: CurveAnalysis) -> list[str]:
    """The findings that are not true of a curve."""
    allowed = {"starts_at_chance", FINDS.get(fault or "", fault or "")}
    told = []
    for finding in findings_of(analysis):
        name = finding.check.removeprefix("curve.")
        if name == "levelled_off" and analysis.level is not None:
            if fault in GOES_ON:
                steps = made.log.column("train/loss").step[: len(made.clean)]
                at = min(int(np.searchsorted(steps, analysis.level.since_step)), len(made.clean) - 1)
                clean = made.clean
                if clean[at] - clean[-1] > LEVEL * (clean[0] - clean[-1]):
                    told.append(name)
            continue
        if name not in allowed:
            told.append(name)
    if fault in ("spikes", "early spike"):
        told += ["spikes"] * max(0, len(analysis.spikes) - len(made.truth["spikes"]))
    return told


def judge_healthy(first: int, count: int, verbose: bool) -> dict[str, float]:
    """False findings on healthy curves, and how often the forecast's interval holds the truth."""
    false: collections.Counter[str] = collections.Counter()
    laws = held = 0
    took = []
    for seed in range(first, first + count):
        made = healthy(seed)
        begin = time.perf_counter()
        analysis = analyse(made.log)
        took.append(time.perf_counter() - begin)
        told = wrong(None, made, analysis)
        false.update(told)
        if told and verbose:
            print(f"  healthy {seed}: {made.name}: {told}", flush=True)
        if analysis.convergence is not None:
            gain = analysis.convergence.gain
            laws, held = laws + 1, held + (gain.low <= made.truth["gain"] <= gain.high)
    figures = {
        "false findings a healthy curve": sum(false.values()) / count,
        "interval of the gain holds it": held / max(laws, 1),
        "seconds a curve (median)": float(np.median(took)),
    }
    print(f"{count} healthy curves, {laws} with a law; false findings: {dict(false)}")
    for name, value in figures.items():
        print(f"{name:<36}{value:8.4f}", flush=True)
    return figures


def judge_faulty(fault: str, first: int, count: int, verbose: bool) -> dict[str, float]:
    """How many of a planted fault are found, and what else is told beside it."""
    hits = planted = 0
    extra: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + count):
        made = faulty(fault, seed)
        analysis = analyse(made.log)
        one, of = seen(fault, made, analysis)
        told = wrong(fault, made, analysis)
        hits, planted = hits + one, planted + of
        extra.update(told)
        if verbose and (one < of or told):
            print(f"  {fault} {seed}: {made.name}: {made.truth} found {one} of {of}, false {told}")
    recall, false = hits / planted, sum(extra.values()) / count
    print(f"{fault:<14}{planted:>9}{hits:>9}{recall:>9.3f}{false:>15.3f}  {dict(extra) or ''}", flush=True)
    return {f"recall of {fault}": recall, f"false findings beside {fault}": false}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--healthy", type=int, default=500)
    parser.add_argument("--faulty", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first curve")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--verbose", action="store_true", help="name every curve that was judged wrongly")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    if given.healthy:
        figures |= judge_healthy(given.first, given.healthy, given.verbose)
    print(f"{'fault':<14}{'planted':>9}{'found':>9}{'recall':>9}{'false a curve':>15}", flush=True)
    for fault in given.faults if given.faulty else ():
        figures |= judge_faulty(fault, given.first, given.faulty, given.verbose)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
