"""How the cost of a check grows with the number of layers, from 10 to 10,000.

    python benchmarks/growth.py [--json FILE]

One thread; layers of 32 x 32 elements, each a weight and a bias. Medians over checks. ``pass`` is one bare
pass of ``torch._foreach_norm`` over the same gradients; ``host`` is the alarm rule alone, on numpy arrays.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from palingenesis import Monitor, MonitorConfig

WIDTH = 32
CHECKS = 30


def measure(layers: int) -> dict[str, float]:
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    checking = Monitor(model, None, out=None, config=MonitorConfig(check_every=1))
    guarding = Monitor(model, None, out=None, config=MonitorConfig(check_every=10**9))
    watch = checking._watchers.layers
    host: list[float] = []
    judge = watch.check

    def timed(*given):
        begin = time.perf_counter()
        events = judge(*given)
        host.append(time.perf_counter() - begin)
        return events

    watch.check = timed
    rows = []
    for number in range(CHECKS):
        # Gradients that never change would look clipped, which costs the rule a second look.
        torch._foreach_mul_(gradients, 1.0 + 0.1 * (number % 3))
        marks = [time.perf_counter()]
        for call in (lambda: torch._foreach_norm(gradients), guarding.step, checking.step):
            call()
            marks.append(time.perf_counter())
        rows.append([after - before for before, after in pairwise(marks)])
    bare, guard, check = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "layers": layers,
        "pass_ms": bare,
        "guarded_step_ms": guard,
        "check_ms": check,
        "host_ms": 1e3 * statistics.median(host),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("palingenesis").setLevel(logging.CRITICAL)
    found = [measure(layers) for layers in (10, 100, 1_000, 10_000)]
    names = list(found[0])
    print("".join(f"{name:>18}" for name in names))
    for row in found:
        print("".join(f"{row[name]:18.3f}" if name != "layers" else f"{row[name]:18d}" for name in names))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
