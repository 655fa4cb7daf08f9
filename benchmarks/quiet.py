"""False alarms on healthy runs: how often the monitor rings when nothing is wrong.

    python benchmarks/quiet.py [--seeds 5] [--steps 1500]

Trains small models of kinds that other monitors ring on (layers dropped at random, experts, rare heads,
adapters and branches that start at zero, convergence to zero, heavy-tailed or negative losses), each with
``check_every`` 1, 10 and 50, and prints every run whose verdict is not HEALTHY.
"""

from __future__ import annotations

import argparse
import collections
import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from palingenesis import Monitor

WIDTH, BATCH = 32, 32
Step = Callable[[int], torch.Tensor]


def mlp(depth: int = 4, width: int = WIDTH, out: int = 1) -> nn.Sequential:
    hidden = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, out))


def regression(model: nn.Module, noise: float = 0.1) -> Step:
    teacher = torch.randn(WIDTH)

    def step(_: int) -> torch.Tensor:
        x = torch.randn(BATCH, WIDTH)
        y = (x @ teacher).tanh().unsqueeze(1) + noise * torch.randn(BATCH, 1)
        return F.mse_loss(model(x), y)

    return step


def plain() -> tuple[nn.Module, Step]:
    model = mlp()
    return model, regression(model)


def converging() -> tuple[nn.Module, Step]:
    """A fixed batch fitted without noise: gradients shrink by orders of magnitude."""
    model = mlp(2)
    x = torch.randn(16, WIDTH)
    y = torch.randn(16, 1)
    return model, lambda _: F.mse_loss(model(x), y)


def convolutional() -> tuple[nn.Module, Step]:
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for c in (3, 8, 8)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    pattern = torch.randn(4, 3, 8, 8)

    def step(_: int) -> torch.Tensor:
        label = torch.randint(0, 4, (16,))
        return F.cross_entropy(model(pattern[label] + torch.randn(16, 3, 8, 8)), label)

    return model, step


class Block(nn.Module):
    def __init__(self, width: int, zero: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        if zero:
            nn.init.zeros_(self.attention.out_proj.weight)
            nn.init.zeros_(self.mlp[2].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A tiny language model; ``drop`` is the chance of skipping each block."""

    def __init__(self, drop: float = 0.0, zero: bool = False) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(64, WIDTH), nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(WIDTH, zero) for _ in range(3))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.drop = drop

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            if not (self.training and torch.rand(()) < self.drop):
                x = block(x)
        return self.head(x)


def language(drop: float = 0.0, zero: bool = False) -> Callable[[], tuple[nn.Module, Step]]:
    def build() -> tuple[nn.Module, Step]:
        model = Language(drop, zero)
        table = torch.softmax(2 * torch.randn(64, 64), dim=1)

        def step(_: int) -> torch.Tensor:
            tokens = [torch.randint(0, 64, (8,))]
            for _ in range(16):
                tokens.append(torch.multinomial(table[tokens[-1]], 1).squeeze(1))
            text = torch.stack(tokens, dim=1)
            return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

        return model, step

    return build


def experts() -> tuple[nn.Module, Step]:
    """Eight experts, each batch routed to few: rare ones are missing from most steps."""
    model = nn.ModuleDict(
        {"trunk": mlp(1, out=WIDTH), "experts": nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(8))}
    )
    weights = torch.tensor([1.0, 1, 1, 0.5, 0.5, 0.2, 0.1, 0.05])
    teacher = torch.randn(WIDTH)

    def step(_: int) -> torch.Tensor:
        x = torch.randn(BATCH, WIDTH)
        hidden = model["trunk"](x)
        chosen = torch.multinomial(weights, 2)
        y = sum(model["experts"][int(i)](hidden) for i in chosen)
        return F.mse_loss(y, (x @ teacher).tanh().unsqueeze(1))

    return model, step


def rare_head(rate: float) -> Callable[[], tuple[nn.Module, Step]]:
    def build() -> tuple[nn.Module, Step]:
        model = nn.ModuleDict(
            {"trunk": mlp(2, out=WIDTH), "main": nn.Linear(WIDTH, 1), "rare": nn.Linear(WIDTH, 1)}
        )
        first, second = torch.randn(WIDTH), torch.randn(WIDTH)

        def step(_: int) -> torch.Tensor:
            x = torch.randn(BATCH, WIDTH)
            hidden = model["trunk"](x)
            loss = F.mse_loss(model["main"](hidden), (x @ first).tanh().unsqueeze(1))
            if torch.rand(()) < rate:
                loss = loss + F.mse_loss(model["rare"](hidden), (x @ second).tanh().unsqueeze(1))
            return loss

        return model, step

    return build


class Adapted(nn.Module):
    """A frozen linear map with a low-rank adapter whose second factor starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


def lora() -> tuple[nn.Module, Step]:
    model = nn.Sequential(Adapted(WIDTH), nn.ReLU(), Adapted(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    return model, regression(model)


def heavy_tailed() -> tuple[nn.Module, Step]:
    """Examples weighted log-normally: the loss has no typical size."""
    model = mlp(2)
    inner = regression(model)
    return model, lambda s: inner(s) * torch.exp(torch.randn(()))


def negative() -> tuple[nn.Module, Step]:
    """A Gaussian log-likelihood that passes through zero and ends negative."""
    model = mlp(2, out=2)
    teacher = torch.randn(WIDTH)

    def step(_: int) -> torch.Tensor:
        x = torch.randn(BATCH, WIDTH)
        y = (x @ teacher).tanh().unsqueeze(1) + 0.1 * torch.randn(BATCH, 1)
        mean, log_std = model(x).chunk(2, dim=1)
        log_std = log_std.clamp(-5, 5)
        return (log_std + 0.5 * ((y - mean) / log_std.exp()) ** 2).mean()

    return model, step


KINDS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "plain MLP": plain,
    "converging": converging,
    "CNN with BatchNorm": convolutional,
    "language model": language(),
    "zero-initialised branches": language(zero=True),
    "stochastic depth 0.2": language(drop=0.2),
    "stochastic depth 0.5": language(drop=0.5),
    "rare experts": experts,
    "rare head 10%": rare_head(0.1),
    "rare head 2%": rare_head(0.02),
    "LoRA": lora,
    "heavy-tailed loss": heavy_tailed,
    "negative loss": negative,
}


def run(kind: str, seed: int, steps: int, check_every: int, **options: object) -> Monitor:
    """One healthy run of a kind, monitored without a record."""
    torch.manual_seed(seed)
    model, loss_of = KINDS[kind]()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 50) * 0.5 * (1 + math.cos(math.pi * s / steps))
    )
    monitor = Monitor(model, optimizer, out=None, check_every=check_every, **options)
    for step in range(1, steps + 1):
        loss = loss_of(step)
        loss.backward()
        monitor.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    monitor.close()
    return monitor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--check_every", type=int, nargs="*", default=[1, 10, 50])
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("palingenesis").setLevel(logging.CRITICAL)
    total: collections.Counter[int] = collections.Counter()
    rang: collections.Counter[int] = collections.Counter()
    for kind in given.kinds:
        for every in given.check_every:
            bad = []
            for seed in range(given.seeds):
                monitor = run(kind, seed, given.steps, every)
                total[every] += 1
                if monitor.verdict != "HEALTHY":
                    rang[every] += 1
                    told = [e for e in monitor.events if e.severity != "info" and not e.ordinary]
                    bad.append((seed, monitor.verdict, len(told), told[0].message if told else ""))
            print(f"{kind:28} check_every={every:<3} not healthy: {len(bad)} of {given.seeds}", flush=True)
            for seed, verdict, count, message in bad:
                print(f"    seed {seed}: {verdict}, {count} events; first: {message[:160]}", flush=True)
    for every in given.check_every:
        print(f"check_every={every}: {rang[every]} of {total[every]} healthy runs not called HEALTHY")


if __name__ == "__main__":
    main()
