"""What the signals of tiers 2 and 3 cost on a Llama-style model of about 30 M parameters, family by family.

    python benchmarks/tiers.py [--rounds 20] [--lr 1e-3] [--json FILE]

One thread. Every figure is a median over rounds in which everything is timed in turn, so that a machine whose
speed drifts slows all alike. The unit is one bare pass of ``torch._foreach_norm``: over the gradients for
tier 2, over the weights for tier 3. Families are called as the monitor calls them: what one has found is
handed on to the next. The spectrum is warm; between two rounds the weights move by one AdamW step (``--lr``),
as far as they may go in the many small steps between two looks: the spectrum costs less where they rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from overhead import batch, model_of_30m, seconds
from torch import nn

from palingenesis.layers import find_layers
from palingenesis.signals.cosine import GradientCosine
from palingenesis.signals.drift import Drift
from palingenesis.signals.memory import Memory
from palingenesis.signals.spectrum import Spectrum
from palingenesis.signals.updates import Updates
from palingenesis.signals.weights import WeightNorms

TIER2 = ("cosine_arm", "cosine_compute", "memory")
TIER3 = ("weight_norms", "spectrum_warm", "drift", "updates_arm", "updates_compute")
TOKENS = 128
# Rounds that are not counted: the first has a cold spectrum, and memory that is not touched yet.
WARM_UP = 3


class Families:
    """The signals of one model, and the steps that feed them."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        self.bytes_of_model = sum(parameter.nbytes for parameter in model.parameters())
        layers = find_layers(model)
        self.cosine, self.memory = GradientCosine(layers), Memory(layers)
        self.norms, self.spectrum = WeightNorms(layers), Spectrum(layers, model)
        self.drift = Drift(layers, model_bytes=self.bytes_of_model)
        self.updates = Updates(layers, [self.optimizer], width=self.drift.width)
        self.drift.begin()
        self.held: dict[str, int] = {}
        # Of each round, the blocks' median of ‖ΔW‖/‖W‖.
        self.moved: list[float] = []

    def round(self, number: int) -> dict[str, float]:
        """Seconds that each took at two consecutive steps."""
        step = 2 * number
        self.optimizer.zero_grad()
        self.model(**batch(TOKENS)).loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        weights = [parameter.detach() for parameter in self.model.parameters()]
        took = {"gradients": seconds(lambda: torch._foreach_norm(gradients))}
        took["cosine_arm"] = seconds(lambda: self.cosine.arm(step))
        held = {"cosine": self.cosine.nbytes}
        took["cosine_compute"] = seconds(lambda: self.cosine.compute(step + 1))
        took["memory"] = seconds(self.memory.compute)
        took["weights"] = seconds(lambda: torch._foreach_norm(weights))
        took["weight_norms"] = seconds(self.norms.compute)
        found: dict[str, torch.Tensor] = {}
        took["spectrum_warm"] = seconds(lambda: found.update(self.spectrum.compute(self.norms.norms)))
        took["drift"] = seconds(lambda: self.drift.compute(keep=True))
        took["updates_arm"] = seconds(
            lambda: self.updates.arm(step, self.norms.norms, self.drift.hand_over())
        )
        held |= {
            "weight_norms": sum(norm.nbytes for norm in self.norms.norms.values()),
            "spectrum": self.spectrum.nbytes,
            "drift": self.drift.nbytes,
            "updates": self.updates.nbytes,
        }
        self.optimizer.step()
        moved: dict[str, torch.Tensor] = {}
        took["updates_compute"] = seconds(lambda: moved.update(self.updates.compute(step + 1)))
        # As the monitor does when the numbers have arrived: the next call goes on from them.
        self.spectrum.decode({name: tensor.numpy() for name, tensor in found.items()})
        ratios = self.updates.decode({name: tensor.numpy() for name, tensor in moved.items()}).layers
        self.moved.append(statistics.median(ratios["health/update_ratio"].values()))
        self.held = held
        return took


def measure(families: Families, rounds: int) -> dict[str, float]:
    """Cost in passes, and what is held while a step is compared with the next, against the model."""
    taken = [families.round(number) for number in range(rounds + WARM_UP)][WARM_UP:]
    figures: dict[str, float] = {}
    for tier, names, unit in (("tier2", TIER2, "gradients"), ("tier3", TIER3, "weights")):
        for name in names:
            figures[f"{name}_passes"] = statistics.median(took[name] / took[unit] for took in taken)
        figures[f"{tier}_passes"] = statistics.median(
            sum(took[name] for name in names) / took[unit] for took in taken
        )
        figures[f"pass_over_{unit}_ms"] = 1e3 * statistics.median(took[unit] for took in taken)
    figures["weights_moved_in_a_round_pct"] = 100 * statistics.median(families.moved[WARM_UP:])
    for name, held in families.held.items():
        figures[f"{name}_held_pct_of_model"] = 100 * held / families.bytes_of_model
    figures["held_pct_of_model"] = 100 * sum(families.held.values()) / families.bytes_of_model
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the step between two rounds")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of_30m()
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{size / 1e6:.1f} M parameters in {len(list(model.parameters()))} tensors, torch {torch.__version__}"
    )
    figures = measure(Families(model, given.lr), given.rounds)
    for name, value in figures.items():
        print(f"{name:44} {value:10.3f}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
