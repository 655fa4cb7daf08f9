"""How the cost grows: with the number of layers, from 10 to 10,000, and with parameters, from 1 M to 300 M.

    python benchmarks/growth.py [--rounds 3] [--largest 300] [--json FILE]

One thread. ``pass`` is one bare pass of ``torch._foreach_norm`` over the same gradients. The first table is
of checks in models of layers of 32 x 32 elements, each a weight and a bias; ``host`` is the alarm rule alone,
on numpy arrays. The second is of Llama-style models whose weights move by 1% between two looks: a step with
the guard, a check, and the signals of tiers 2 and 3. Medians over steps, or over looks.
"""

from __future__ import annotations

import logging
import statistics
import time
from itertools import pairwise

import torch
from common import SIZES, llama, parser, save, tell_rows
from torch import nn

from palingenesis import Monitor, MonitorConfig
from tiers import Families, figures_of

WIDTH = 32
CHECKS = 30
NEVER = 10**9
# Nothing but the guard and the checks.
QUIET = {"logging_steps": NEVER, "tier2_every": NEVER, "tier3_every": NEVER, "noise_scale": False}


def monitor_of(model: nn.Module, check_every: int) -> Monitor:
    return Monitor(model, None, out=None, config=MonitorConfig(check_every=check_every, **QUIET))


def checks(model: nn.Module, count: int) -> dict[str, float]:
    """A bare pass, a step with the guard, a check and its alarm rule: median milliseconds."""
    gradients = [parameter.grad for parameter in model.parameters()]
    checking, guarding = monitor_of(model, 1), monitor_of(model, NEVER)
    watch = checking._judging.watchers.layers
    host: list[float] = []
    judge = watch.check

    def timed(*given):
        begin = time.perf_counter()
        events = judge(*given)
        host.append(time.perf_counter() - begin)
        return events

    watch.check = timed
    rows = []
    for number in range(count + 1):
        # Gradients that never change would look clipped, which costs the rule a second look.
        torch._foreach_mul_(gradients, 1.0 + 0.1 * (number % 3))
        marks = [time.perf_counter()]
        for call in (lambda: torch._foreach_norm(gradients), guarding.step, checking.step):
            call()
            marks.append(time.perf_counter())
        rows.append([after - before for before, after in pairwise(marks)])
    # At its first step a monitor looks at everything.
    bare, guard, check = (1e3 * statistics.median(column) for column in zip(*rows[1:], strict=True))
    return {
        "pass_ms": bare,
        "guarded_step_ms": guard,
        "check_ms": check,
        "host_ms": 1e3 * statistics.median(host),
    }


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def by_layers(layers: int) -> dict[str, float]:
    model = with_gradients(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    return {"layers": layers, **checks(model, CHECKS)}


def by_parameters(millions: int, rounds: int) -> dict[str, float]:
    model = with_gradients(llama(millions))
    families = Families(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    looks = []
    for _ in range(rounds + 1):
        with torch.no_grad():
            for parameter in families.parameters:
                parameter += 0.01 * parameter.std(correction=0) * torch.randn_like(parameter)
        looks.append([families.look()])
    found = figures_of(looks[1:], families)
    pass_ms = found["pass_over_weights_ms"]
    guard = checks(model, 5)
    return {
        "parameters_m": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "pass_ms": pass_ms,
        "guarded_step_passes": guard["guarded_step_ms"] / guard["pass_ms"],
        "check_passes": guard["check_ms"] / guard["pass_ms"],
        "tier2_passes": found["tier2_passes"],
        "tier3_passes": found["tier3_passes"],
        "tier3_ms": found["tier3_passes"] * pass_ms,
        "held_pct_of_model": found["held_pct_of_model"],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--largest", type=int, default=300, help="million parameters of the largest model")
    given = options.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("palingenesis").setLevel(logging.CRITICAL)
    layers = [by_layers(count) for count in (10, 100, 1_000, 10_000)]
    tell_rows(layers)
    parameters = [by_parameters(size, given.rounds) for size in SIZES if size <= given.largest]
    tell_rows(parameters)
    save({"layers": layers, "parameters": parameters}, given.json)


if __name__ == "__main__":
    main()
