"""The parts of fused parameters, proven by what the modules do with them and not by how they are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

from palingenesis.layers import Unit, find_layers

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def _openai() -> nn.Module:
    return transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**GPT2))


def _phi3(groups: int) -> nn.Module:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, num_key_value_heads=groups))


def _neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL))


def _neox_japanese() -> nn.Module:
    small = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    config = transformers.GPTNeoXJapaneseConfig(**small, intermediate_multiple_size=2)
    return transformers.GPTNeoXJapaneseForCausalLM(config)


def _bloom() -> nn.Module:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=4)
    )


def _persimmon() -> nn.Module:
    return transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**SMALL, qk_layernorm=False))


def _mpt() -> nn.Module:
    config = transformers.MptConfig(d_model=16, n_heads=4, n_layers=1, vocab_size=32, max_seq_len=32)
    return transformers.MptForCausalLM(config)


def _modernbert() -> nn.Module:
    config = transformers.ModernBertConfig(
        **SMALL, cls_token_id=1, sep_token_id=2, attn_implementation="eager"
    )
    return transformers.ModernBertForMaskedLM(config)


def _dbrx() -> nn.Module:
    config = transformers.DbrxConfig(
        d_model=16,
        n_heads=4,
        n_layers=1,
        vocab_size=32,
        max_seq_len=32,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 16},
    )
    return transformers.DbrxForCausalLM(config)


def _minimax() -> nn.Module:
    config = transformers.MiniMaxConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=4,
        layer_types=["linear_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=4,
    )
    return transformers.MiniMaxForCausalLM(config)


ATTENTIONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "GPT-2": (_gpt2, "c_proj"),
    "GPT": (_openai, "c_proj"),
    "Phi-3": (lambda: _phi3(4), "o_proj"),
    "Phi-3, grouped queries": (lambda: _phi3(2), "o_proj"),
    "Phi-3, one key": (lambda: _phi3(1), "o_proj"),
    "GPT-NeoX": (_neox, "dense"),
    "GPT-NeoX Japanese": (_neox_japanese, "dense"),
    "Bloom": (_bloom, "dense"),
    "Persimmon": (_persimmon, "dense"),
    "MPT": (_mpt, "out_proj"),
    "ModernBERT": (_modernbert, "Wo"),
    "DBRX": (_dbrx, "out_proj"),
}


class Probe:
    """One attention inside a model: its fused projection's output and what its output projection gets."""

    def __init__(self, model: nn.Module, out_name: str) -> None:
        self.model = model.eval().requires_grad_(True)
        parts = [unit for unit in find_layers(model).units if unit.part and unit.part.name in "qkv"]
        self.units = {unit.part.name: unit for unit in parts if unit.part and unit.name.endswith("weight")}
        self.all_units = parts
        path = self.units["q"].name.removesuffix(".weight")
        self.fused = model.get_submodule(path)
        self.out = model.get_submodule(path.rpartition(".")[0]).get_submodule(out_name)
        self.transposed = type(self.fused).__name__ == "Conv1D"

    def columns(self, name: str) -> torch.Tensor:
        """Which outputs of the fused projection belong to a part."""
        weight, part = self.units[name].parameter, self.units[name].part
        assert part is not None
        count = weight.shape[1] if self.transposed else weight.shape[0]
        index = torch.arange(count)
        marked = index.expand(weight.shape) if self.transposed else index[:, None].expand(weight.shape)
        return part.of(marked.contiguous()).unique()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, ``[tokens, features]``, on the graph."""
        seen: dict[str, torch.Tensor] = {}

        def fused(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            seen["fused"] = output

        def attended(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seen["attended"] = inputs[0]

        hooks = [self.fused.register_forward_hook(fused), self.out.register_forward_pre_hook(attended)]
        self.model(input_ids=torch.tensor([[3, 9, 4, 7, 11, 5]]))
        for hook in hooks:
            hook.remove()
        return seen["fused"], seen["attended"].reshape(-1, seen["attended"].shape[-1])

    def zero(self, name: str) -> None:
        with torch.no_grad():
            for unit in self.all_units:
                assert unit.part is not None
                if unit.part.name == name:
                    unit.part.of(unit.parameter).zero_()


def _probe(name: str) -> Probe:
    torch.manual_seed(0)
    make, out_name = ATTENTIONS[name]
    model = make()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # zero biases would hide a bias of the wrong part
            nn.init.normal_(parameter, std=0.5)
    return Probe(model, out_name)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_parts_share_out_the_whole(name: str) -> None:
    probe = _probe(name)
    columns = torch.cat([probe.columns(part) for part in "qkv"])
    fused, _ = probe.run()
    assert sorted(columns.tolist()) == list(range(fused.shape[-1]))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_q_is_what_matters_for_its_own_token_only(name: str) -> None:
    """What the last token attends to depends on no other token's query, but on every key and value."""
    probe = _probe(name)
    fused, attended = probe.run()
    attended[-1].square().sum().backward()
    assert fused.grad is not None
    earlier = fused.grad.reshape(-1, fused.shape[-1])[:-1].abs().amax(0)
    assert not earlier[probe.columns("q")].any()
    assert earlier[probe.columns("k")].any()
    assert earlier[probe.columns("v")].all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_without_v_attention_brings_nothing(name: str) -> None:
    for part, nothing in (("q", False), ("k", False), ("v", True)):
        probe = _probe(name)
        probe.zero(part)
        _, attended = probe.run()
        assert (not attended.any()) == nothing


@pytest.mark.parametrize("name", ATTENTIONS)
def test_without_k_attention_looks_nowhere(name: str) -> None:
    """Every score is the same whatever the query: its gradient is zero."""
    probe = _probe(name)
    probe.zero("k")
    fused, attended = probe.run()
    attended.square().sum().backward()
    assert fused.grad is not None
    gradient = fused.grad.reshape(-1, fused.shape[-1]).abs().amax(0)
    assert not gradient[probe.columns("q")].any()
    assert gradient[probe.columns("v")].all()


def test_minimax_linear_attention() -> None:
    torch.manual_seed(0)
    probe = Probe(_minimax(), "out_proj")
    assert sorted(torch.cat([probe.columns(part) for part in "qkv"]).tolist()) == list(range(48))
    fused, attended = probe.run()
    attended[-1].square().sum().backward()
    assert fused.grad is not None
    earlier = fused.grad.reshape(-1, fused.shape[-1])[:-1].abs().amax(0)
    assert not earlier[probe.columns("q")].any()
    assert earlier[probe.columns("k")].any()
    assert earlier[probe.columns("v")].any()


@pytest.mark.parametrize("dead", ["q", "k", "v"])
def test_multihead_attention(dead: str) -> None:
    """With three inputs, each part of the weight is the only way for one of them."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(attention.in_proj_bias)
    weights = {u.part.name: u for u in find_layers(attention).units if u.part and u.name == "in_proj_weight"}
    assert list(weights) == ["q", "k", "v"]
    with torch.no_grad():
        _part(weights[dead], attention.in_proj_weight).zero_()
    inputs = {name: torch.randn(1, 5, 8, requires_grad=True) for name in "qkv"}
    attention(inputs["q"], inputs["k"], inputs["v"])[0].square().sum().backward()
    reached = {name for name, x in inputs.items() if x.grad is not None and x.grad.any()}
    assert dead not in reached
    if dead != "v":  # equal values leave the scores nothing to choose from
        assert reached == {"q", "k", "v"} - {dead}


def test_multihead_attention_without_bias_and_its_biases() -> None:
    torch.manual_seed(0)
    assert find_layers(nn.MultiheadAttention(8, 2, bias=False)).names == (
        "in_proj[q]",
        "in_proj[k]",
        "in_proj[v]",
        "out_proj",
    )
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    biases = {u.part.name: u for u in find_layers(attention).units if u.part and u.name == "in_proj_bias"}
    x = torch.randn(1, 5, 8)
    attention(x, x, x)[0].square().sum().backward()
    norms = {name: float(_part(u, attention.in_proj_bias.grad).norm()) for name, u in biases.items()}
    # What is added to every key adds the same to every score, which softmax does not see.
    assert norms["k"] < 1e-5 * norms["q"]
    assert norms["q"] < norms["v"]


def _part(unit: Unit, tensor: torch.Tensor | None) -> torch.Tensor:
    assert unit.part is not None
    assert tensor is not None
    return unit.part.of(tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _phi3(2),
        lambda: transformers.GlmForCausalLM(
            transformers.GlmConfig(**SMALL, num_key_value_heads=2, head_dim=4)
        ),
    ],
    ids=["Phi-3", "GLM"],
)
def test_gate_and_up(make: Callable[[], nn.Module]) -> None:
    """The output changes its sign with up, and not with the gate, which goes through the activation."""
    torch.manual_seed(0)
    model = make()
    parts = {u.part.name: u for u in find_layers(model).units if u.part and "gate_up" in u.name}
    assert list(parts) == ["gate", "up"]
    mlp: Any = model.get_submodule(parts["up"].name.removesuffix(".gate_up_proj.weight"))
    x = torch.randn(3, 16)
    with torch.no_grad():
        before = mlp(x)
        _part(parts["up"], parts["up"].parameter).neg_()
        torch.testing.assert_close(mlp(x), -before)
        _part(parts["up"], parts["up"].parameter).neg_()
        _part(parts["gate"], parts["gate"].parameter).neg_()
        assert (mlp(x) + before).abs().max() > 0.1 * before.abs().max()


class CausalSelfAttention(nn.Module):
    """nanoGPT's, under its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(8, 24)
        self.c_proj = nn.Linear(8, 8)


class ByHeads(nn.Module):
    """A widely copied tutorial's layout: ``qkv_proj(x).reshape(batch, tokens, heads, 3 * head_dim)``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.qkv_proj = nn.Linear(8, 24)
        self.qkv = nn.Linear(8, 24)
        self.gate_up_proj = nn.Linear(8, 24)
        self.query_key_value = nn.Linear(8, 24)


def test_a_known_class_is_split_and_a_name_alone_is_not() -> None:
    known = find_layers(nn.ModuleDict({"attn": CausalSelfAttention()}))
    assert known.names[:3] == ("attn.c_attn[q]", "attn.c_attn[k]", "attn.c_attn[v]")
    unknown = find_layers(nn.ModuleDict({"attn": ByHeads()}))
    assert unknown.names == ("attn.qkv_proj", "attn.qkv", "attn.gate_up_proj", "attn.query_key_value")


def test_known_classes_of_another_layout_are_not_split() -> None:
    codegen = transformers.CodeGenForCausalLM(transformers.CodeGenConfig(**GPT2, rotary_dim=4))
    assert "transformer.h.0.attn.qkv_proj" in find_layers(codegen).names
    for multi_query in (True, False):
        config = transformers.GPTBigCodeConfig(**GPT2, multi_query=multi_query)
        starcoder = transformers.GPTBigCodeForCausalLM(config)
        assert "transformer.h.0.attn.c_attn" in find_layers(starcoder).names
    cross = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, add_cross_attention=True))
    assert "transformer.h.0.crossattention.c_attn" in find_layers(cross).names


def test_looking_at_a_parametrized_weight_does_not_compute_it() -> None:
    """Spectral normalisation takes a step of its power iteration whenever the weight is read."""
    block = CausalSelfAttention()
    parametrizations.spectral_norm(block.c_attn)
    model = nn.ModuleDict({"attn": block})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert find_layers(model).names == ("attn.c_attn", "attn.c_proj")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("name", ["GPT-2", "Phi-3, grouped queries", "Bloom"])
def test_a_part_is_a_view_of_the_gradient(name: str) -> None:
    probe = _probe(name)
    _, attended = probe.run()
    attended.square().sum().backward()
    gradient = probe.units["q"].parameter.grad
    assert gradient is not None
    squares = 0.0
    for unit in probe.units.values():
        assert unit.part is not None
        part = unit.part.of(gradient)
        assert part.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()
        squares += float(part.double().square().sum())
    assert squares == pytest.approx(float(gradient.double().square().sum()))
