"""Every objective against its definition over whole logits in double precision, and against TRL's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from palingenesis.errors import ConfigError
from palingenesis.sft.objectives import (
    NEED_WINDOW,
    OBJECTIVES,
    ObjectiveParams,
    ObjectiveValue,
    Window,
    objective,
    samples_of,
    window_sums,
)
from palingenesis.sft.token_statistics import TokenStatistics, token_statistics

WIDTH, VOCABULARY = 5, 13
TOLERANCE = 1e-5


class Batch:
    """Hidden states and labels; the head is shared by all batches."""

    def __init__(self, rows: int, length: int, seed: int = 0, answers: str = "some") -> None:
        random = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(rows, length, WIDTH, generator=random)
        self.labels = torch.randint(0, VOCABULARY, (rows, length), generator=random)
        if answers == "some":
            self.labels[torch.rand(rows, length, generator=random) < 0.4] = -100
        elif answers in ("none", "one"):
            self.labels[:] = -100
            self.labels[0, -1] = 3 if answers == "one" else -100


def head() -> torch.Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(7)) * 1.5


def exact_window(
    name: str, batches: list[Batch], weight: torch.Tensor, pbar: float = 0.93, beta: float = 1.0
) -> tuple[torch.Tensor, float, float, int]:
    """Mean loss over a window (with a graph), mean CE, mean gate and tokens, from the definitions.

    One token at a time; a sample is a row. Nothing here knows of chunks or sums over micro-batches.
    """
    rows: list[list[tuple[torch.Tensor, float, float]]] = []  # by sample: CE, p, α of each token
    for batch in batches:
        hidden = batch.hidden.to(weight.dtype)
        for row in range(len(batch.labels)):
            tokens = []
            for t in range(batch.labels.shape[1] - 1):
                target = int(batch.labels[row, t + 1])
                if target != -100:
                    z = weight @ hidden[row, t]
                    log_probs = z - torch.logsumexp(z, 0)
                    probs = log_probs.detach().exp()
                    alpha = float((probs**2).sum())
                    tokens.append((-log_probs[target], float(probs[target]), alpha))
            if tokens:
                rows.append(tokens)
    nlls = [math.fsum(nll.item() for nll, _, _ in tokens) / len(tokens) for tokens in rows]
    mean = math.fsum(nlls) / max(len(nlls), 1)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in nlls) / max(len(nlls) - 1, 1))

    def raw_gate(sample: int, p: float, alpha: float) -> float:
        if name == "ce":
            return 1.0
        if name == "deft":
            return float(p**alpha)
        if name == "dft":
            return p
        if name == "info_sft":
            return p * max(0.0, math.log(pbar / (1 - pbar)) - math.log(p / (1 - p)))
        z = (nlls[sample] - mean) / spread if spread > 0 else 0.0
        return p * math.exp(-beta * max(0.0, z))

    tokens = [(nll, raw_gate(i, p, a)) for i, row in enumerate(rows) for nll, p, a in row]
    count = len(tokens)
    gate = math.fsum(w for _, w in tokens) / max(count, 1)
    divisor = gate if name == "info_sft" and gate > 0 else 1.0
    total = sum((w / divisor * nll for nll, w in tokens), weight.sum() * 0)
    loss = total / max(count, 1)
    return loss, math.fsum(nll.item() for nll, _ in tokens) / max(count, 1), gate, count


def statistics(
    batch: Batch, weight: torch.Tensor, hidden: torch.Tensor | None = None, chunks: int = 3
) -> TokenStatistics:
    return token_statistics(batch.hidden if hidden is None else hidden, weight, batch.labels, chunks=chunks)


def means(values: list[ObjectiveValue]) -> tuple[torch.Tensor, float, float, int]:
    """The caller's division."""
    tokens = sum(int(value.tokens) for value in values)
    by = max(tokens, 1)
    loss = torch.stack([value.loss_sum for value in values]).sum() / by
    ce, gate = (sum(float(getattr(v, name)) for v in values) / by for name in ("ce_sum", "gate_sum"))
    return loss, ce, gate, tokens


def agree(found: Any, exact: Any, tolerance: float = TOLERANCE) -> None:
    for one, true in zip(found, exact, strict=True):
        one, true = (x.item() if isinstance(x, torch.Tensor) else x for x in (one, true))
        assert one == pytest.approx(true, rel=tolerance, abs=tolerance)


# -- values and gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("rows", "length", "answers"),
    [(3, 5, "some"), (1, 8, "all"), (4, 2, "all"), (2, 4, "one"), (2, 4, "none"), (1, 1, "all")],
)
def test_one_batch_with_any_number_of_chunks(name: str, rows: int, length: int, answers: str) -> None:
    batch = Batch(rows, length, answers=answers)
    weight = head().double().requires_grad_()
    exact = exact_window(name, [batch], weight)
    exact[0].backward()
    for chunks in range(1, rows * length + 1):
        ours = head().requires_grad_()
        found = means([objective(name, statistics(batch, ours, chunks=chunks))])
        found[0].backward()
        agree(found, exact)
        assert ours.grad is not None and weight.grad is not None
        torch.testing.assert_close(ours.grad.double(), weight.grad, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("params", [ObjectiveParams(), ObjectiveParams(pbar=0.6, beta=2.5)])
def test_a_window_is_the_same_however_it_is_cut(name: str, params: ObjectiveParams) -> None:
    """Micro-batches of unequal lengths, one without a loss-bearing token, as from several ranks."""
    batches = [Batch(1, 9, 1), Batch(3, 4, 2), Batch(2, 6, 3, "none"), Batch(2, 3, 4, "all")]
    weight = head().double().requires_grad_()
    exact = exact_window(name, batches, weight, params.pbar, params.beta)
    exact[0].backward()
    ours = head().requires_grad_()
    window = None
    if name in NEED_WINDOW:
        with torch.no_grad():
            window = Window.of(
                torch.stack([window_sums(statistics(b, ours), params) for b in batches]).sum(0)
            )
    values = [objective(name, statistics(b, ours), params, window=window) for b in batches]
    found = means(values)
    found[0].backward()
    agree(found, exact)
    assert ours.grad is not None and weight.grad is not None
    torch.testing.assert_close(ours.grad.double(), weight.grad, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_bf16(name: str) -> None:
    """The reference reads the same rounded numbers; the logits are bf16, so only so much can agree."""
    batch = Batch(4, 16, answers="all")
    low, ours = batch.hidden.bfloat16(), head().bfloat16().requires_grad_()
    batch.hidden = low.float()
    weight = ours.detach().double().requires_grad_()
    exact = exact_window(name, [batch], weight)
    exact[0].backward()
    found = means([objective(name, statistics(batch, ours, low))])
    found[0].backward()
    assert found[0].dtype == torch.float32
    agree(found, exact, 2e-2)
    assert ours.grad is not None and weight.grad is not None
    assert (ours.grad.double() - weight.grad).norm() < 2e-2 * weight.grad.norm()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gate_is_not_differentiated(name: str) -> None:
    """Finite differences with the gate held are the gradient; with a gate that moves they are not."""
    batch = Batch(3, 6, seed=5, answers="all")
    start = head().double().requires_grad_()
    hidden = batch.hidden.double()
    stats = statistics(batch, start, hidden)
    value = objective(name, stats)
    (by_token,) = torch.autograd.grad(value.loss_sum, stats.log_p, retain_graph=True)
    value.loss_sum.backward()
    # Were the gate differentiated, the derivative by the log-probability would not be the gate itself.
    held = -by_token
    assert float((held * -stats.log_p).sum()) == pytest.approx(float(value.loss_sum))

    def fixed(weight: torch.Tensor) -> float:
        return float((held * -statistics(batch, weight, hidden).log_p).sum())

    def moving(weight: torch.Tensor) -> float:
        return float(objective(name, statistics(batch, weight, hidden)).loss_sum)

    assert start.grad is not None
    random = torch.Generator().manual_seed(3)
    differs = 0.0
    with torch.no_grad():
        for _ in range(5):
            way = torch.randn(start.shape, generator=random, dtype=torch.float64)
            along = float((start.grad * way).sum())
            assert slope_of(fixed, start, way) == pytest.approx(along, rel=1e-6, abs=1e-7)
            differs = max(differs, abs(slope_of(moving, start, way) - along))
    assert (differs > 1e-2) == (name != "ce")


def slope_of(loss: Callable[[torch.Tensor], float], at: torch.Tensor, way: torch.Tensor) -> float:
    step = 1e-5
    return (loss(at + step * way) - loss(at - step * way)) / (2 * step)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_gradient_pushes_a_target_down(name: str) -> None:
    """With InfoSFT's gate in the graph, sure targets would be made less likely."""
    log_p = torch.linspace(-6, -1e-4, 40).view(4, 10).requires_grad_()
    mask = torch.ones(4, 10, dtype=torch.bool)
    stats = TokenStatistics(log_p, log_p.detach() * 0, torch.full((4, 10), 0.4), mask, mask)
    objective(name, stats).loss_sum.backward()
    assert log_p.grad is not None and bool((log_p.grad <= 0).all())


# -- edges of the definitions ------------------------------------------------------------------------------


def given(log_p: list[list[float]]) -> TokenStatistics:
    """Statistics with these log-probabilities; 1.0 marks a position without loss."""
    values = torch.tensor(log_p)
    mask = values <= 0
    values = torch.where(mask, values, 0.0).requires_grad_()
    return TokenStatistics(values, values.detach() * 0, values.detach().exp() ** 2, mask, mask)


def test_cadft_with_one_sample_or_no_deviation_is_dft() -> None:
    for log_p in ([[-1.0, -2.0, -0.5]], [[-1.0, -3.0], [-2.0, 1.0]], [[-1.0, -2.0], [1.0, 1.0]]):
        stats = given(log_p)
        assert float(objective("cadft", stats).loss_sum) == float(objective("dft", stats).loss_sum)
    # Rounding is no deviation: these means differ by 1e-7 in fp32.
    stats = given([[-1.1, -2.3], [-1.7, -1.7]])
    nlls = -stats.log_p.detach().double().mean(1)
    assert 0 < float((nlls[0] - nlls[1]).abs()) < 1e-6
    assert float(objective("cadft", stats).loss_sum) == float(objective("dft", stats).loss_sum)
    hard = ObjectiveParams(beta=0.0)
    stats = given([[-1.0, -2.0], [-5.0, -7.0]])
    assert float(objective("cadft", stats, hard).loss_sum) == float(objective("dft", stats).loss_sum)


def test_cadft_weighs_only_samples_that_are_harder() -> None:
    stats = given([[-1.0, -1.0], [-2.0, 1.0], [-6.0, -6.0]])
    objective("cadft", stats).loss_sum.backward()
    mean = (1 + 2 + 6) / 3
    std = math.sqrt(((1 - mean) ** 2 + (2 - mean) ** 2 + (6 - mean) ** 2) / 2)
    weight = math.exp(-(6 - mean) / std)
    assert stats.log_p.grad is not None
    exact = [[-math.exp(-1)] * 2, [-math.exp(-2), 0.0], [-weight * math.exp(-6)] * 2]
    torch.testing.assert_close(stats.log_p.grad, torch.tensor(exact))


def test_samples_of_packed_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 0, 1, 1, 1]])
    ids = samples_of(positions)
    assert ids.tolist() == [[0, 0, 0, 1, 1, 2], [3, 3, 4, 4, 5, 6]]
    packed = given([[-1.0, -2.0, 1.0, -4.0, -0.5, -3.0]])
    apart = given([[-1.0, -2.0, 1.0], [-4.0, -0.5, 1.0], [-3.0, 1.0, 1.0]])
    values = [
        objective("cadft", packed, samples=samples_of(torch.tensor([[0, 1, 2, 0, 1, 0]]))),
        objective("cadft", apart),
    ]
    assert float(values[0].loss_sum) == pytest.approx(float(values[1].loss_sum))
    assert float(values[0].loss_sum) != pytest.approx(float(objective("cadft", packed).loss_sum))
    with pytest.raises(ConfigError, match="do not fit"):
        objective("cadft", packed, samples=positions)


def test_info_sft_at_its_edges() -> None:
    # Certain, more likely than p̄, without loss, and with a probability that fp32 rounds to zero.
    stats = given([[0.0, -0.01, 1.0, -200.0, -1.0]])
    value = objective("info_sft", stats)
    value.loss_sum.backward()
    assert stats.log_p.grad is not None
    assert stats.log_p.grad[0].tolist() == pytest.approx([0, 0, 0, 0, -4.0])  # w / mean(w) over four tokens
    assert float(value.loss_sum) == pytest.approx(4.0)
    p = math.exp(-1)
    assert float(value.gate_sum) == pytest.approx(p * (math.log(0.93 / 0.07) - math.log(p / (1 - p))))
    sure = given([[-0.01, -0.02]])  # every gate is 0
    value = objective("info_sft", sure)
    value.loss_sum.backward()
    assert float(value.loss_sum) == 0.0 and sure.log_p.grad is not None and not sure.log_p.grad.any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_not_finite_shows(name: str) -> None:
    stats = given([[-1.0, -2.0], [math.nan, -1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    stats = TokenStatistics(
        stats.log_p + torch.tensor([[0, 0], [math.nan, 0]]), *[stats.log_p] * 2, mask, mask
    )
    value = objective(name, stats)
    assert math.isnan(float(value.loss_sum)) and math.isnan(float(value.ce_sum))


def test_bad_options_are_refused() -> None:
    for wrong in ({"pbar": 0.0}, {"pbar": 1.0}, {"pbar": math.nan}, {"beta": -1.0}, {"beta": math.inf}):
        with pytest.raises(ConfigError, match="cannot be used"):
            ObjectiveParams(**wrong)
    with pytest.raises(ConfigError, match="there are ce, deft, dft, info_sft, cadft"):
        objective("nll", given([[-1.0]]))


def test_the_example_in_the_docs_runs_as_it_is_written() -> None:
    page = Path(__file__).parents[2] / "docs" / "objectives.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S)
    batches = [Batch(2, 5, 1), Batch(1, 9, 2)]
    ours, weight = head().requires_grad_(), head().double().requires_grad_()
    exec(code, {"step": [(batch.hidden, batch.labels) for batch in batches], "head": ours})
    exact_window("info_sft", batches, weight)[0].backward()
    assert ours.grad is not None and weight.grad is not None
    torch.testing.assert_close(ours.grad.double(), weight.grad, rtol=TOLERANCE, atol=TOLERANCE)


# -- TRL ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("loss_type", "name"), [("nll", "ce"), ("dft", "dft")])
def test_trl_computes_the_same(tmp_path: Path, loss_type: str, name: str) -> None:
    """Loss, gradients and metrics of one accumulated step of a real ``SFTTrainer``."""
    from datasets import Dataset
    from tests.integrations.tiny import llama, tokenizer
    from trl import SFTConfig, SFTTrainer

    random = torch.Generator().manual_seed(2)
    data = []
    for length in (5, 9, 3, 12):
        ids = torch.randint(1, 64, (length,), generator=random).tolist()
        data.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    trainer = SFTTrainer(
        llama(),
        SFTConfig(
            str(tmp_path),
            loss_type=loss_type,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    model = trainer.model
    batches = [trainer.data_collator(data[:2]), trainer.data_collator(data[2:])]
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    model.train()
    theirs = torch.zeros(())
    for batch in batches:
        loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.tensor(count))
        loss.backward()
        theirs += loss.detach()
    gradients = {key: one.grad.clone() for key, one in model.named_parameters()}
    model.zero_grad()
    ours = torch.zeros(())
    assert isinstance(model.lm_head, nn.Linear)
    for i, batch in enumerate(batches):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        stats = token_statistics(hidden, model.lm_head, batch["labels"], chunks=3)
        value = objective(name, stats)
        (value.loss_sum / count).backward()
        ours += value.loss_sum.detach() / count
        entropy = float(stats.entropy.sum() / value.tokens)
        accuracy = float(stats.is_top1.sum() / value.tokens)
        assert entropy == pytest.approx(trainer._metrics["train"]["entropy"][i], rel=1e-5)
        assert accuracy == pytest.approx(trainer._metrics["train"]["mean_token_accuracy"][i])
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    for key, one in model.named_parameters():
        torch.testing.assert_close(one.grad, gradients[key], rtol=1e-5, atol=1e-7)
