"""What monitoring costs on a Llama-style model of about 30 M parameters, as ratios within one run.

    python benchmarks/overhead.py [--rounds 40] [--json FILE]

One thread. First single calls: medians over rounds in which all things compared are timed in turn, in units
of one bare pass of ``torch._foreach_norm`` over the same gradients.

Then everything together as it is by default (guard, checks, tiers 1 to 3, hooks, a record on disk), over a
hundred steps, after which all of it comes again, and in between bare training steps of 512 and 4,096 tokens,
so that a machine whose speed drifts slows all alike. What monitoring takes depends on the model and not on
the tokens, so the monitored steps are short ones.
"""

from __future__ import annotations

import gc
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterable

import torch
from common import Text, describe, llama, median_ratio, parser, save, seconds, tell
from torch import nn

from palingenesis import Monitor, MonitorConfig

NEVER = 10**9
# Steps after which everything has been due, at defaults; those before any are counted, because looks at
# weights near those at random cost more; tokens of a monitored step.
PERIOD, BEFORE, TOKENS = 100, 300, 64
# Steps of a period at which bare training steps are timed as well, none of them looked at closely.
BARE = {512: (5, 25, 45, 65, 85), 4096: (35, 75)}


def per_call(model: nn.Module, text: Text, rounds: int) -> dict[str, float]:
    """A check and the steps between checks, in passes over the gradients; and tier 1, in milliseconds."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(**text.batch(TOKENS)).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    loss = torch.tensor(1.0)

    def monitor(check_every: int, *, guard: bool, logging_steps: int = NEVER) -> Monitor:
        config = MonitorConfig(
            check_every=check_every,
            guard_every_step=guard,
            logging_steps=logging_steps,
            tier2_every=NEVER,
            tier3_every=NEVER,
            noise_scale=False,
        )
        return Monitor(model, optimizer, out=None, config=config)

    monitors = {
        "check": monitor(1, guard=False),
        "check_with_guard": monitor(1, guard=True),
        "step_with_guard": monitor(NEVER, guard=True),
        "step_without_guard": monitor(NEVER, guard=False),
        "step_with_tier1": monitor(NEVER, guard=False, logging_steps=1),
    }
    calls: dict[str, Callable[[], object]] = {"pass": lambda: torch._foreach_norm(gradients)}
    calls |= {name: lambda one=one: one.step(loss) for name, one in monitors.items()}
    rows = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds + 5)][5:]
    figures = {f"{name}_passes": median_ratio(rows, [name], "pass") for name in monitors}
    figures["pass_ms"] = 1e3 * statistics.median(row["pass"] for row in rows)
    figures["step_without_guard_ms"] = 1e3 * statistics.median(row["step_without_guard"] for row in rows)
    tier1 = [row["step_with_tier1"] - row["step_without_guard"] for row in rows]
    figures["tier1_ms"] = 1e3 * statistics.median(tier1)
    return figures


class Training:
    """A training loop, monitored as it is by default, with a record in a folder."""

    def __init__(self, model: nn.Module, text: Text, folder: str) -> None:
        self.model, self.text = model, text
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.monitor = Monitor(model, self.optimizer, out=folder, overwrite=True)

    def bare(self, tokens: int) -> float:
        """Seconds of a step that the monitor does not see."""
        data = self.text.batch(tokens)

        def step() -> None:
            self.optimizer.zero_grad()
            self.model(**data).loss.backward()
            self.optimizer.step()

        return seconds(step)

    def monitored(self) -> dict[str, float]:
        """Seconds that calls of the monitor took in a step, and ``backward``, with its hooks or without."""
        data = self.text.batch(TOKENS)
        self.optimizer.zero_grad()
        took = seconds(lambda: self.monitor.batch(data["labels"]))
        loss = self.model(**data).loss
        hooked = self.monitor._numbers.tiers.hearing._step is not None
        backward = seconds(loss.backward)
        took += seconds(lambda: self.monitor.step(loss))
        self.optimizer.step()
        return {"monitor": took, "backward_with_hooks" if hooked else "backward": backward}


def at_defaults(model: nn.Module, text: Text) -> dict[str, float]:
    """Share of the training step that everything takes together, and what it holds."""
    bare: dict[int, list[float]] = {tokens: [] for tokens in BARE}
    rows: list[dict[str, float]] = []
    own = tensors_besides(())
    with tempfile.TemporaryDirectory() as folder:
        training = Training(model, text, folder)
        held = 0
        early = [training.monitored()["monitor"] for _ in range(BEFORE)]
        for step in range(1, PERIOD + 1):
            rows.append(training.monitored())
            for tokens, when in BARE.items():
                if step in when:
                    bare[tokens].append(training.bare(tokens))
            if step in (PERIOD - 1, PERIOD):
                known = [*own, *model.parameters(), *(p.grad for p in model.parameters())]
                state = [t for one in training.optimizer.state.values() for t in one.values()]
                held = max(held, sum(t.nbytes for t in tensors_besides([*known, *state])))
        training.monitor.close()
    usual = statistics.median(row["backward"] for row in rows if "backward" in row)
    hooks = sum(row["backward_with_hooks"] - usual for row in rows if "backward_with_hooks" in row)
    calls = [row["monitor"] for row in rows]
    figures = {
        "monitor_a_step_ms": 1e3 * (sum(calls) + hooks) / PERIOD,
        "of_it_hooks_ms": 1e3 * hooks / PERIOD,
        "usual_step_ms": 1e3 * statistics.median(calls),
        "longest_step_ms": 1e3 * max(calls),
        "longest_step_early_ms": 1e3 * max(early),
        "tensors_held_pct_of_model": 100 * held / sum(parameter.nbytes for parameter in model.parameters()),
    }
    for tokens, times in bare.items():
        step_s = statistics.median(times)
        figures[f"training_step_at_{tokens}_tokens_s"] = step_s
        figures[f"share_of_step_at_{tokens}_tokens_pct"] = figures["monitor_a_step_ms"] / step_s / 10
    return figures


def tensors_besides(known: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """All tensors that Python knows of but some, each storage once."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in known if tensor is not None}
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type != "meta" and one.layout is torch.strided:
            place = one.untyped_storage().data_ptr()
            if place not in seen:
                seen.add(place)
                found.append(one)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=40)
    given = options.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("palingenesis").setLevel(logging.CRITICAL)
    model = llama(30)
    print(describe(model), flush=True)
    text = Text(model.config.vocab_size)
    figures = per_call(model, text, given.rounds)
    tell(figures)
    together = at_defaults(model, text)
    tell(together)
    save(figures | together, given.json)


if __name__ == "__main__":
    main()
