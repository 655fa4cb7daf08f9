"""What the signals of tiers 2 and 3 cost on a Llama-style model of about 30 M parameters, family by family.

    python benchmarks/tiers.py [--rounds 10] [--looks 3] [--steps 100] [--lr 3e-4] [--json FILE]

The model is trained first, and its weights are kept at every look: ``--steps`` AdamW steps lie between two.
Then they are looked at again and again, in ``--rounds``, as the monitor would: what one family has found is
handed on to the next, and the spectrum is warm. One thread. Of each look the shortest
time over rounds counts, which other work on the machine disturbs least; figures are medians over looks. The
unit is one bare pass of ``torch._foreach_norm``: over the gradients for tier 2, over the weights for tier 3.
The faster the weights move, the more the spectrum costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from common import Text, describe, llama, median_ratio, parser, save, seconds, tell
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals.cosine import GradientCosine
from palingenesis.signals.drift import Drift
from palingenesis.signals.memory import Memory
from palingenesis.signals.packet import Packet
from palingenesis.signals.spectrum import Spectrum
from palingenesis.signals.updates import Updates
from palingenesis.signals.weights import WeightNorms

COSINE = ("cosine_arm", "cosine_compute")
TIER2 = (*COSINE, "memory")
TIER3 = ("weight_norms", "spectrum", "drift", "updates_arm", "updates_compute")
TOKENS = 64
WARM_UP = 50
Weights = list[torch.Tensor]


class Families:
    """The signals of one model, called as the monitor calls them.

    Args:
        model: the model, with gradients.
        optimizer: one that steps it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters = list(model.parameters())
        self.device = self.parameters[0].device
        self.bytes_of_model = sum(parameter.nbytes for parameter in self.parameters)
        layers = find_layers(model)
        self.cosine, self.memory = GradientCosine(layers), Memory(layers)
        self.norms, self.spectrum = WeightNorms(layers), Spectrum(layers, model)
        self.drift = Drift(layers, model_bytes=self.bytes_of_model)
        self.updates = Updates(layers, [optimizer], width=self.drift.width)
        self.drift.begin()
        self.held: dict[str, int] = {}
        self._step = 0

    def look(self) -> dict[str, float]:
        """Seconds that each took, over two consecutive steps."""
        self._step += 2
        step = self._step
        gradients = [parameter.grad for parameter in self.parameters]
        weights = [parameter.detach() for parameter in self.parameters]
        found: dict[str, torch.Tensor] = {}
        took: dict[str, float] = {}

        def timed(name, call):
            took[name] = seconds(call, self.device)

        timed("gradients", lambda: torch._foreach_norm(gradients))
        timed("cosine_arm", lambda: self.cosine.arm(step))
        held = {"cosine": self.cosine.nbytes}
        timed("cosine_compute", lambda: self.cosine.compute(step + 1))
        timed("memory", self.memory.compute)
        timed("weights", lambda: torch._foreach_norm(weights))
        timed("weight_norms", self.norms.compute)
        timed("spectrum", lambda: found.update(self.spectrum.compute(self.norms.norms)))
        timed("drift", lambda: self.drift.compute(keep=True))
        timed("updates_arm", lambda: self.updates.arm(step, self.norms.norms, self.drift.hand_over()))
        held |= {
            "weight_norms": sum(norm.nbytes for norm in self.norms.norms.values()),
            "spectrum": self.spectrum.nbytes,
            "drift": self.drift.nbytes,
            "updates": self.updates.nbytes,
        }
        self.optimizer.step()
        timed("updates_compute", lambda: self.updates.compute(step + 1))
        # As the monitor does when the numbers have arrived: the next call goes on from them.
        self.spectrum.decode(Packet(found).arrays())
        self.held = held
        return took


def figures_of(rounds: Sequence[Sequence[dict[str, float]]], families: Families) -> dict[str, float]:
    """Cost in passes, and what is held while a step is compared with the next, against the model."""
    figures: dict[str, float] = {}
    taken = [
        {name: min(look[name] for look in looks) for name in looks[0]} for looks in zip(*rounds, strict=True)
    ]
    for tier, names, unit in (("tier2", TIER2, "gradients"), ("tier3", TIER3, "weights")):
        for name in names:
            figures[f"{name}_passes"] = median_ratio(taken, [name], unit)
        figures[f"{tier}_passes"] = median_ratio(taken, names, unit)
        figures[f"pass_over_{unit}_ms"] = 1e3 * statistics.median(took[unit] for took in taken)
    for name, held in families.held.items():
        figures[f"{name}_held_pct_of_model"] = 100 * held / families.bytes_of_model
    figures["held_pct_of_model"] = 100 * sum(families.held.values()) / families.bytes_of_model
    return figures


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, looks: int, steps: int
) -> Iterator[Weights]:
    """Train a model, and yield its weights before each look; there is one before the first step."""
    rate = optimizer.param_groups[0]["lr"]
    for step in range(1 + (looks - 1) * steps):
        if step % steps == 0:
            yield [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM_UP)
        optimizer.zero_grad()
        model(**text.batch(TOKENS)).loss.backward()
        optimizer.step()


def moved(kept: Sequence[Weights]) -> float:
    """Median over looks and matrices of ‖ΔW‖/‖W‖, in percent."""
    return 100 * statistics.median(
        float((now - before).norm() / before.norm())
        for one, next_one in pairwise(kept)
        for before, now in zip(one, next_one, strict=True)
        if now.dim() > 1
    )


def measure(
    millions: int, *, rounds: int, looks: int, steps: int, rate: float, device: torch.device | None = None
) -> dict[str, float]:
    """Train a model of a size, look at it again and again, and tell what that took."""
    model = llama(millions, device)
    print(describe(model), flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    text = Text(model.config.vocab_size, device)
    # Looks at weights near those at random are not counted: until its leading direction lasts from one look
    # to the next, a matrix costs more.
    kept = list(trained(model, optimizer, text, looks + 3, steps))[2:]
    taken: list[list[dict[str, float]]] = []
    for _ in range(rounds):
        families = Families(model, optimizer)
        taken.append([])
        for weights in [kept[0], *kept]:
            with torch.no_grad():
                torch._foreach_copy_(families.parameters, weights)
            optimizer.zero_grad()
            model(**text.batch(TOKENS)).loss.backward()
            taken[-1].append(families.look())
    figures = figures_of([looks[2:] for looks in taken], families)
    figures["spectrum_first_look_passes"] = min(looks[0]["spectrum"] / looks[0]["weights"] for looks in taken)
    figures["weights_moved_between_looks_pct"] = moved(kept)
    return figures


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--looks", type=int, default=3, help="that are counted, in a round")
    options.add_argument("--steps", type=int, default=100, help="between two looks")
    options.add_argument("--lr", type=float, default=3e-4, help="of these steps")
    given = options.parse_args()
    torch.set_num_threads(1)
    figures = measure(30, rounds=given.rounds, looks=given.looks, steps=given.steps, rate=given.lr)
    tell(figures)
    save(figures, given.json)


if __name__ == "__main__":
    main()
