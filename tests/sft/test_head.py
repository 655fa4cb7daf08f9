"""Per-token numbers from inside the forward pass, against the model's own logits in double precision."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from palingenesis.errors import ConfigError
from palingenesis.sft import head as head_module
from palingenesis.sft.head import TokenOutput, _cut, can_cut, read_head_inside, require_exact

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


def soft_capped() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0))


def divided() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0))


def multiplied() -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=3.0))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1)
    )


def with_bias() -> PreTrainedModel:
    made = llama()
    made.lm_head = nn.Linear(16, VOCABULARY)
    return made


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "soft cap": soft_capped,
    "divided": divided,
    "multiplied": multiplied,
    "gpt2": gpt2,
    "bias": with_bias,
}


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(8.0)  # opinions, not noise
    return model.eval()


def with_lora(model: PreTrainedModel, targets: Any) -> Any:
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return adapted.eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=random)
    labels = ids.clone()
    labels[torch.rand(3, 9, generator=random) < 0.4] = -100
    return ids, labels


def check(model: Any, **inputs: Any) -> TokenOutput:
    """Everything that is read, and the gradient of its loss, against whole logits."""
    ids, labels = batch()
    model.zero_grad()
    read = model(input_ids=ids, labels=labels, token_statistics=True, **inputs)
    mask = functional.pad(labels[:, 1:] != -100, (0, 1))
    assert torch.equal(read.label_mask, mask) and 5 < mask.sum() < 24
    assert set(read) == {"log_probs", "entropy", "collision", "is_top1", "label_mask"}  # and no logits
    (-read.log_probs[mask].sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    log_probs = model(input_ids=ids, **inputs).logits.double().log_softmax(-1)
    targets = functional.pad(labels[:, 1:], (0, 1), value=0).clamp(min=0)
    exact = log_probs.gather(-1, targets[..., None]).squeeze(-1)
    probs = log_probs.exp()
    torch.testing.assert_close(read.log_probs[mask].double(), exact[mask], rtol=1e-5, atol=1e-5)
    entropy = -(probs * log_probs).sum(-1)
    torch.testing.assert_close(read.entropy[mask].double(), entropy[mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        read.collision[mask].double(), probs.square().sum(-1)[mask], rtol=1e-4, atol=1e-5
    )
    assert torch.equal(read.is_top1[mask], (log_probs.argmax(-1) == targets)[mask])
    for values in (read.log_probs, read.entropy, read.collision, read.is_top1):
        assert not values[~mask].any()
    (-exact[mask].sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys() and gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)
    return read


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_numbers_and_gradients_are_those_of_whole_logits(kind: str, chunks: int) -> None:
    model = make(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    read_head_inside(model, chunks=chunks)
    require_exact(model, VOCABULARY)
    check(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_models_differ_in_what_they_do_after_the_head() -> None:
    """Else the test above would not see a cap or a factor that is left out."""
    ids, _ = batch()
    for kind in ("soft cap", "divided", "multiplied"):
        model = make(kind)
        head = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state)
        off = (head.log_softmax(-1) - model(input_ids=ids).logits.log_softmax(-1)).abs().max()
        assert off > 0.1, kind


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["lm_head"]], ids=str)
def test_under_lora(targets: Any) -> None:
    model = make("llama")
    adapted = with_lora(model, targets)
    read_head_inside(model, chunks=3)
    require_exact(adapted, VOCABULARY)
    check(adapted)
    # The adapter counts.
    ids, labels = batch()
    on = adapted(input_ids=ids, labels=labels, token_statistics=True).log_probs
    with adapted.disable_adapter():
        off = adapted(input_ids=ids, labels=labels, token_statistics=True).log_probs
    assert (on - off).abs().max() > 0.01


def test_an_adapter_that_comes_later_is_read_too() -> None:
    model = make("llama")
    read_head_inside(model, chunks=2)
    check(with_lora(model, ["q_proj", "lm_head"]))


def test_padding_is_passed_on() -> None:
    model = make("llama")
    read_head_inside(model, chunks=2)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    check(model, attention_mask=mask)


def test_packed_documents_do_not_see_each_other() -> None:
    """Positions that begin again part documents: what comes first has no say in what comes second."""
    model = make("llama")
    read_head_inside(model, chunks=2)
    ids, _ = batch()
    row, other = ids[:1].clone(), ids[:1].clone()
    other[0, :4] = (row[0, :4] + 5) % VOCABULARY
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    found = [
        model(input_ids=one, labels=one, position_ids=positions, token_statistics=True).log_probs
        for one in (row, other)
    ]
    assert torch.equal(found[0][0, 4:], found[1][0, 4:])
    assert not torch.equal(found[0][0, :4], found[1][0, :4])


@pytest.mark.parametrize("kind", MODELS)
def test_otherwise_the_forward_pass_is_what_it_was(kind: str) -> None:
    ids, labels = batch()
    model = make(kind)
    before = model(input_ids=ids, labels=labels)
    signature = inspect.signature(model.forward)
    text = model.generate(ids[:1], max_new_tokens=6, do_sample=False)
    read_head_inside(model, chunks=2)
    after = model(input_ids=ids, labels=labels)
    assert torch.equal(before.loss, after.loss) and torch.equal(before.logits, after.logits)
    assert torch.equal(model(ids).logits, before.logits)  # by position as well
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(ids[:1], max_new_tokens=6, do_sample=False), text)
    assert text.shape[1] > ids.shape[1]


def test_generate_under_lora() -> None:
    ids, _ = batch()
    model = make("llama")
    adapted = with_lora(model, ["q_proj"])
    text = adapted.generate(input_ids=ids[:1], max_new_tokens=6, do_sample=False)
    read_head_inside(model, chunks=2)
    assert torch.equal(adapted.generate(input_ids=ids[:1], max_new_tokens=6, do_sample=False), text)


def by_torch(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), by_torch], ids=range(3)
)
def test_a_copy_has_weights_of_its_own(copied: Callable[[Any], Any]) -> None:
    ids, labels = batch()
    model = make("llama")
    before = model(input_ids=ids).logits
    read_head_inside(model, chunks=2)
    other = copied(model)
    assert torch.equal(other(input_ids=ids).logits, before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.allclose(other(input_ids=ids).logits, before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert other(input_ids=ids).logits.any()
    if copied is copy.deepcopy:
        read = other(input_ids=ids, labels=labels, token_statistics=True)
        exact = other(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        mask = read.label_mask[:, :-1]
        torch.testing.assert_close(read.log_probs[:, :-1][mask], exact[mask], rtol=1e-4, atol=1e-5)


# -- models that are not what they say ----------------------------------------------------------------------


class Secretive(LlamaForCausalLM):
    """Does something to its logits of which its configuration says nothing."""

    change: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = type(self).change(output.logits)
        return output


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z * 1.05,
        lambda z: 30 * torch.tanh(z / 30),
        lambda z: z.index_fill(-1, torch.tensor([3]), -1e4),
        lambda z: z.roll(1, dims=-1),
        lambda z: z * float("nan"),
    ],
    ids=["scale", "soft cap", "forbidden token", "order", "nan"],
)
@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_changes_its_logits_in_secret_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], lora: bool
) -> None:
    torch.manual_seed(0)
    kind = type("Secretive", (Secretive,), {"change": staticmethod(change)})
    model = kind(LlamaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    called = with_lora(model, ["q_proj"]) if lora else model
    read_head_inside(model, chunks=2)
    with pytest.raises(ConfigError, match="does something to its logits") as error:
        require_exact(called, VOCABULARY)
    assert "\n" not in str(error.value)


def test_looking_changes_nothing() -> None:
    model = make("llama").train()
    model.model.layers[0].eval()
    read_head_inside(model, chunks=2)
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    require_exact(model, VOCABULARY)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("vocabulary", [1, 7, VOCABULARY])
def test_tokens_that_are_tried_exist(vocabulary: int) -> None:
    model = make("llama")
    read_head_inside(model, chunks=2)
    require_exact(model, vocabulary)


def test_half_precision_has_the_tolerance_that_it_needs() -> None:
    model = make("llama").to(torch.bfloat16)
    read_head_inside(model, chunks=2)
    require_exact(model, VOCABULARY)
    other = make("llama").to(torch.bfloat16)
    other.config.logit_scale = 0.5  # which a Llama does not look at
    read_head_inside(other, chunks=2)
    with pytest.raises(ConfigError):
        require_exact(other, VOCABULARY)


# -- kernels -----------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """``cut_cross_entropy`` with its signature, in torch; keeps what it was called with."""
    calls: list[dict[str, Any]] = []

    def linear_cross_entropy(
        e: torch.Tensor,
        c: torch.Tensor,
        targets: torch.Tensor,
        bias: torch.Tensor | None = None,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: str = "mean",
        shift: bool | int = 0,
        return_lse: bool = False,
        *,
        impl: str = "cce",
    ) -> torch.Tensor:
        assert not shift and not return_lse and ignore_index == -100
        calls.append({"reduction": reduction, "impl": impl, "softcap": softcap, "bias": bias})
        logits = functional.linear(e, c, bias).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
        return loss.view(targets.shape) if reduction == "none" else loss

    module = ModuleType("cut_cross_entropy")
    module.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    return calls


@pytest.mark.parametrize("kind", ["llama", "tied", "bias", "soft cap"])
def test_the_cut_path_has_the_same_log_probabilities(kind: str, stand_in: list[dict[str, Any]]) -> None:
    ids, labels = batch()
    model = make(kind)
    read_head_inside(model, chunks=2)
    chunked = model(input_ids=ids, labels=labels, token_statistics=True)
    hidden = model.base_model(input_ids=ids).last_hidden_state
    head = model.get_output_embeddings()
    soft_cap = model.config.final_logit_softcapping if kind == "soft cap" else None
    cut = _cut(hidden, head, labels, soft_cap)
    assert stand_in == [{"reduction": "none", "impl": "cce_exact", "softcap": soft_cap, "bias": head.bias}]
    assert torch.equal(cut.label_mask, chunked.label_mask)
    torch.testing.assert_close(cut.log_probs, chunked.log_probs, rtol=1e-5, atol=1e-5)
    assert not cut.log_probs[~cut.label_mask].any()
    # What objectives take: the rest is zero, on the same positions.
    statistics = cut.statistics
    assert statistics.mask is cut.label_mask and statistics.log_p is cut.log_probs
    for rest in (statistics.entropy, statistics.collision, statistics.is_top1):
        assert rest.shape == cut.log_probs.shape and not rest.any()
    gradients = []
    for read in (cut, chunked):
        model.zero_grad()
        (-read.log_probs.sum()).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-4, msg=name)


def test_kernels_are_not_reached_on_the_cpu(stand_in: list[dict[str, Any]]) -> None:
    ids, labels = batch()
    model = make("llama")
    read_head_inside(model, chunks=2, cut=True)
    assert model(input_ids=ids, labels=labels, token_statistics=True).entropy is not None
    assert not stand_in
    assert not can_cut() or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("kind", "lora", "reached"),
    [
        ("llama", None, True),
        ("soft cap", None, True),
        ("multiplied", None, False),
        ("llama", "lm_head", False),
    ],
)
def test_which_heads_the_kernels_get(
    kind: str,
    lora: str | None,
    reached: bool,
    stand_in: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on CUDA: heads whose output is that of their weight alone, and no factor behind them."""
    ids, labels = batch()
    model = make(kind)
    called = model if lora is None else with_lora(model, [lora])
    read_head_inside(model, chunks=2)
    expected = called(input_ids=ids, labels=labels, token_statistics=True).log_probs
    read_head_inside(model, chunks=2, cut=True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    found = called(input_ids=ids, labels=labels, token_statistics=True).log_probs
    assert bool(stand_in) == reached
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_kernels_need_a_device_and_their_package(
    cuda: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(
        head_module, "find_spec", lambda name: True if name == "cut_cross_entropy" and there else None
    )
    assert can_cut() == (cuda and there)
