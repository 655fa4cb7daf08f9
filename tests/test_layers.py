"""What a layer is called, what it owns, and that wrappers around a model change neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, weight_norm

from palingenesis.errors import LayerError
from palingenesis.layers import Layers, find_layers, peel

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **options}))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def assert_complete(layers: Layers, model: nn.Module) -> None:
    """Every parameter that trains is counted exactly once, and layers are slices of the units."""
    counted: dict[int, int] = {}
    for unit in layers.units:
        part = unit.parameter if unit.part is None else unit.part.of(unit.parameter)
        counted[id(unit.parameter)] = counted.get(id(unit.parameter), 0) + part.numel()
    assert counted == {id(p): p.numel() for p in model.parameters() if p.requires_grad}
    owner = np.array(layers.owner)
    assert (np.diff(owner) >= 0).all()
    assert (np.diff(owner) <= 1).all()
    assert owner[0] == 0
    assert owner[-1] == len(layers.names) - 1
    assert len(set(layers.names)) == len(layers.names)
    assert [layers.names[i] for i in layers.owner] == [unit.layer for unit in layers.units]
    labels = [unit.label for unit in layers.units]
    assert len(set(labels)) == len(labels)


# -- names ------------------------------------------------------------------------------------------------


class Vision(nn.Module):
    """Holds parameters of its own, of different kinds, next to modules."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(4))
        self.pos_emb = nn.Parameter(torch.zeros(3, 4))
        self.in_proj_weight = nn.Parameter(torch.zeros(4, 4))
        self.in_proj_bias = nn.Parameter(torch.zeros(4))
        self.weight = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 2)


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Linear(2, 1), ("Linear",)),
        (mlp, ("0", "2")),
        (cnn, ("0", "1", "3")),
        (lambda: nn.LSTM(3, 4, 2), ("LSTM.l0", "LSTM.l1")),
        (lambda: nn.GRU(3, 4, bidirectional=True), ("GRU.l0", "GRU.l0_reverse")),
        (lambda: nn.ModuleDict({"rnn": nn.LSTM(3, 4, proj_size=2)}), ("rnn.l0",)),
        (lambda: nn.ModuleDict({"cell": nn.GRUCell(3, 4)}), ("cell",)),
        (lambda: nn.MultiheadAttention(8, 2), ("in_proj[q]", "in_proj[k]", "in_proj[v]", "out_proj")),
        (
            lambda: nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, kdim=4, vdim=6, bias=False)}),
            ("a.q_proj", "a.k_proj", "a.v_proj", "a.out_proj"),
        ),
        (Vision, ("cls_token", "pos_emb", "in_proj", "Vision", "head")),
        (lambda: nn.Sequential(Vision()), ("0.cls_token", "0.pos_emb", "0.in_proj", "0", "0.head")),
        (
            lambda: nn.ModuleDict({"scales": nn.ParameterList([torch.ones(2), torch.ones(3)])}),
            ("scales.0", "scales.1"),
        ),
        (lambda: nn.ModuleDict({"p": nn.ParameterDict({"x": torch.ones(2)})}), ("p.x",)),
        (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3))), ("0",)),
        (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3))), ("0",)),
        (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 3, 1))), ("0",)),
        (lambda: nn.Sequential(weight_norm(nn.Linear(3, 3))), ("0",)),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_names(make: Callable[[], nn.Module], names: tuple[str, ...]) -> None:
    model = make()
    layers = find_layers(model)
    assert layers.names == names
    assert layers.not_watched == ()
    assert_complete(layers, model)


def test_names_of_a_transformer() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    layers = find_layers(model)
    assert layers.names[:6] == (
        "encoder.layers.0.self_attn.in_proj[q]",
        "encoder.layers.0.self_attn.in_proj[k]",
        "encoder.layers.0.self_attn.in_proj[v]",
        "encoder.layers.0.self_attn.out_proj",
        "encoder.layers.0.linear1",
        "encoder.layers.0.linear2",
    )
    assert "decoder.layers.0.multihead_attn.in_proj[v]" in layers.names
    assert_complete(layers, model)


def test_names_of_llama() -> None:
    model = llama()
    layers = find_layers(model)
    assert layers.names[0] == "model.embed_tokens"
    assert layers.names[-2:] == ("model.norm", "lm_head")
    assert [name for name in layers.names if name.startswith("model.layers.1.")] == [
        f"model.layers.1.{name}"
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
        )
    ]
    assert_complete(layers, model)


@pytest.mark.parametrize(
    ("make", "among"),
    [
        (gpt2, ["transformer.wte", "transformer.h.0.attn.c_attn[k]", "transformer.h.0.mlp.c_fc"]),
        (
            lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, num_key_value_heads=2)),
            ["model.layers.0.self_attn.qkv_proj[q]", "model.layers.0.mlp.gate_up_proj[gate]", "lm_head"],
        ),
        (
            lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL)),
            ["gpt_neox.embed_in", "gpt_neox.layers.1.attention.query_key_value[v]", "lm_head"],
        ),
        (
            lambda: transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=4)
            ),
            ["transformer.word_embeddings", "transformer.h.0.self_attention.query_key_value[q]"],
        ),
    ],
    ids=["GPT-2", "Phi-3", "GPT-NeoX", "Bloom"],
)
def test_names_of_language_models(make: Callable[[], nn.Module], among: list[str]) -> None:
    model = make()
    layers = find_layers(model)
    assert [name for name in layers.names if name in among] == among
    assert_complete(layers, model)


def test_weight_and_bias_are_one_layer_of_two_units() -> None:
    layers = find_layers(mlp())
    assert [unit.label for unit in layers.units] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert layers.owner == (0, 0, 1, 1)


def test_parts_of_weight_and_bias_are_grouped_by_layer() -> None:
    layers = find_layers(nn.MultiheadAttention(8, 2))
    assert [unit.label for unit in layers.units] == [
        "in_proj_weight[q]",
        "in_proj_bias[q]",
        "in_proj_weight[k]",
        "in_proj_bias[k]",
        "in_proj_weight[v]",
        "in_proj_bias[v]",
        "out_proj.weight",
        "out_proj.bias",
    ]


# -- ownership --------------------------------------------------------------------------------------------


def test_tied_embeddings_are_counted_once_under_the_first_name() -> None:
    model = llama(tie_word_embeddings=True)
    layers = find_layers(model)
    assert "model.embed_tokens" in layers.names
    assert "lm_head" not in layers.names
    assert_complete(layers, model)


def test_a_module_used_twice_is_one_layer() -> None:
    shared = nn.Linear(2, 2)
    assert find_layers(nn.Sequential(shared, nn.ReLU(), shared)).names == ("0",)


def test_a_tied_weight_leaves_the_other_owner_its_bias() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
    model["head"].weight = model["table"].weight
    layers = find_layers(model)
    assert [(unit.layer, unit.name) for unit in layers.units] == [
        ("table", "table.weight"),
        ("head", "head.bias"),
    ]
    assert_complete(layers, model)


def test_frozen_layers_are_named_with_the_reason() -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[operator]
    layers = find_layers(model)
    assert layers.names == ("2",)
    assert layers.not_watched == (("0", "frozen (requires_grad is off)"),)
    assert_complete(layers, model)


def test_half_a_frozen_layer_is_watched() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)  # type: ignore[operator,union-attr]
    layers = find_layers(model)
    assert [unit.name for unit in layers.units] == ["0.bias", "2.weight", "2.bias"]
    assert layers.not_watched == ()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_lora() -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    layers = find_layers(model)
    assert len(layers.names) == 8
    assert layers.names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"
    assert dict(layers.not_watched)["base_model.model.lm_head"].startswith("frozen")
    assert_complete(layers, model)


def test_parameters_that_are_not_there_yet_are_left_out() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    assert find_layers(model).names == ("1",)
    model(torch.zeros(2, 5))
    assert find_layers(model).names == ("0", "1")


# -- patterns ---------------------------------------------------------------------------------------------


def test_patterns_choose_layers() -> None:
    model = llama()
    layers = find_layers(model, ("*.mlp.*", "lm_*"))
    assert len(layers.names) == 7
    assert all(".mlp." in name or name == "lm_head" for name in layers.names)
    assert dict(layers.not_watched)["model.norm"] == "matches none of layers=('*.mlp.*', 'lm_*')"


@pytest.mark.parametrize(
    ("model", "patterns", "words"),
    [
        (mlp(), ("blocks.*",), ["layers=('blocks.*',)", "names look like 0, 2"]),
        (mlp().requires_grad_(False), ("*",), ["Sequential", "no trainable parameters", "requires_grad"]),
        (nn.ReLU(), ("*",), ["ReLU", "no parameters"]),
    ],
)
def test_nothing_to_watch_is_one_line_that_says_why(
    model: nn.Module, patterns: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(LayerError) as raised:
        find_layers(model, patterns)
    told = str(raised.value)
    assert "\n" not in told
    assert all(word in told for word in words), told


# -- wrappers ---------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


def checkpointed(model: nn.Module) -> nn.Module:
    return checkpoint_wrapper(model)


def inner_checkpointed(model: nn.Module) -> nn.Module:
    for name, child in list(model.named_children()):
        setattr(model, name, checkpoint_wrapper(compiled(child)))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "checkpoint": checkpointed,
    "average": averaged,
    "DataParallel": nn.DataParallel,
    "compile of checkpoint": lambda m: compiled(checkpointed(m)),
    "average of compile": lambda m: averaged(compiled(m)),
    "DataParallel of compile of checkpoint": lambda m: nn.DataParallel(compiled(checkpointed(m))),
    "inside": inner_checkpointed,
    "inside and out": lambda m: compiled(inner_checkpointed(m)),
}
MODELS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(2, 1),
    lambda: parametrizations.weight_norm(nn.Linear(2, 1)),
    lambda: nn.LSTM(3, 4),
    lambda: nn.MultiheadAttention(8, 2),
    Vision,
    mlp,
    gpt2,
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: type(make()).__name__)
def test_wrappers_do_not_show(make: Callable[[], nn.Module], wrapper: str) -> None:
    bare = find_layers(make())
    wrapped_model = WRAPPERS[wrapper](make())
    wrapped = find_layers(wrapped_model)
    assert wrapped.names == bare.names
    assert [unit.label for unit in wrapped.units] == [unit.label for unit in bare.units]
    assert_complete(wrapped, wrapped_model)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: type(make()).__name__)
@pytest.mark.usefixtures("alone")
def test_ddp_does_not_show(make: Callable[[], nn.Module]) -> None:
    bare = find_layers(make())
    for wrap in (lambda m: m, compiled, inner_checkpointed):
        model = nn.parallel.DistributedDataParallel(wrap(make()))
        for outer in (model, compiled(model), averaged(model)):
            wrapped = find_layers(outer)
            assert wrapped.names == bare.names
            assert [unit.label for unit in wrapped.units] == [unit.label for unit in bare.units]


def test_peeling_ends_at_the_model() -> None:
    model = mlp()
    assert peel(model) is model
    assert peel(compiled(averaged(checkpointed(model)))).__class__ is nn.Sequential
    assert peel(nn.DataParallel(compiled(model))) is model


def test_a_child_called_module_is_no_wrapper() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "_module": nn.Linear(2, 2)})
    assert find_layers(model).names == ("module", "_module")


def test_nothing_is_changed_by_looking() -> None:
    model = gpt2()
    before = {name: (id(p), p._version, p.requires_grad) for name, p in model.named_parameters()}
    find_layers(model)
    assert {name: (id(p), p._version, p.requires_grad) for name, p in model.named_parameters()} == before
