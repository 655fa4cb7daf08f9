"""Tokenizers and models are loaded as configured, or refused in one line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sft.data.chats import CHATML, FAMILIES, make_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from palingenesis.errors import ConfigError
from palingenesis.sft import hub
from palingenesis.sft.config import TrainConfig
from palingenesis.sft.data import Masker
from palingenesis.sft.data.packing import Isolation
from palingenesis.sft.model import load_model, load_tokenizer

ROOT = Path(__file__).parents[2]
_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def configured(
    name: Path | str, *, data: dict[str, Any] | None = None, parallel: str = "ddp", **model: Any
) -> TrainConfig:
    return TrainConfig(
        model={"name_or_path": str(name), "torch_dtype": "float32", **model},
        data={"dataset": "demo:chatterbot", "max_seq_length": 64, **(data or {})},
        parallel={"strategy": parallel},
    )


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {
        "vocab_size": 430,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))


def saved(folder: Path, model: Any = None, tokenizer: Any = None) -> Path:
    """A folder with a model and a tokenizer."""
    (model or llama()).save_pretrained(folder)
    (tokenizer or FAMILIES["chatml"].tokenizer()).save_pretrained(folder)
    return folder


def both(config: TrainConfig) -> Any:
    return load_model(config, load_tokenizer(config))


def refused(call: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        call()
    assert "\n" not in str(caught.value)


@cache
def plain_tokenizer() -> Any:
    return make_tokenizer(None, _IM, eos="<|im_end|>")


# -- tokenizers --------------------------------------------------------------------------------------------


def test_a_tokenizer_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(tmp_path / "model")
    tokenizer = load_tokenizer(configured("~/model"))
    assert both(configured("~/model")).num_parameters() == llama().num_parameters()
    assert Masker(tokenizer).end_of_turn == "<|im_end|>"


def test_a_template_from_a_file(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", tokenizer=plain_tokenizer())
    file = tmp_path / "chat.jinja"
    refused(lambda: load_tokenizer(configured(folder)), "has no chat template: set model.chat_template")
    refused(
        lambda: load_tokenizer(configured(folder, chat_template=str(file))),
        "chat.jinja cannot be read: No such file",
    )
    file.write_text("\n")
    refused(lambda: load_tokenizer(configured(folder, chat_template=str(file))), "chat.jinja is empty")
    file.write_text(CHATML)
    tokenizer = load_tokenizer(configured(folder, chat_template=str(file)))
    assert tokenizer.chat_template == CHATML and Masker(tokenizer).method == "turn by turn"


def test_plain_text_needs_no_template(tmp_path: Path) -> None:
    folder = saved(tmp_path, tokenizer=plain_tokenizer())
    text = {"dataset": "text.jsonl", "mode": "pretrain"}
    data: dict[str, Any] = {"dataset": None, "sources": [text]}
    assert load_tokenizer(configured(folder, data=data)).chat_template is None
    for more in ({"sources": [text, {"dataset": "chats.jsonl"}]}, {"eval_dataset": "chats.jsonl"}):
        refused(
            lambda more=more: load_tokenizer(configured(folder, data={**data, **more})), "no chat template"
        )


@pytest.mark.parametrize(
    ("tokens", "template", "expected"),
    [
        ((*_IM, "<|pad|>"), CHATML, "<|pad|>"),
        (_IM, CHATML, "<|endoftext|>"),
        (_IM[:2], CHATML, "<|im_end|>"),
        (_IM, CHATML.replace("}}{% endfor %}", "+ '<|endoftext|>' }}{% endfor %}"), "<|im_end|>"),
    ],
)
def test_a_token_for_padding_is_chosen_and_told(
    tokens: tuple[str, ...], template: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer(template, tokens, eos="<|im_end|>")
    tokenizer.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(settings.read_text()).items() if key != "pad_token"}
    settings.write_text(json.dumps(kept))
    caplog.set_level(logging.INFO, "palingenesis")
    found = load_tokenizer(configured(tmp_path))
    assert found.pad_token == expected and len(found) == len(tokenizer)
    assert [f"no token for padding: {expected!r} is used" in record.message for record in caplog.records] == [
        True
    ]


def test_a_tokenizer_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: load_tokenizer(configured(tmp_path / "none")), "there is no folder '.*none'$")
    refused(lambda: load_tokenizer(configured("./none")), "there is no folder './none'$")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    refused(lambda: load_tokenizer(configured(file)), "is a file; the folder that holds the model is needed")
    monkeypatch.setattr(hub, "_known", (time.monotonic(), False))
    refused(
        lambda: load_tokenizer(configured("someone/nothing")),
        r"the tokenizer of 'someone/nothing' could not be had: .* does not answer and left nothing of it in",
    )
    # Of one that answers, its client tells what is wrong.
    monkeypatch.setattr("palingenesis.sft.model.hub_answers", lambda: True)
    refused(
        lambda: load_tokenizer(configured("someone/nothing")),
        r"the tokenizer of 'someone/nothing' \(no local folder, so a hub name\) could not be loaded: \w+",
    )
    (tmp_path / "empty").mkdir()
    refused(lambda: load_tokenizer(configured(tmp_path / "empty")), "empty' holds no tokenizer_config.json; ")
    (tmp_path / "empty" / "config.json").write_text("{")
    refused(lambda: load_tokenizer(configured(tmp_path / "empty")), "empty' could not be loaded: ")
    refused(lambda: load_tokenizer(configured("demo:gpt")), "there is no 'demo:gpt'")


# -- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_number_format_and_attention(dtype: str, tmp_path: Path) -> None:
    model = both(configured(saved(tmp_path), torch_dtype=dtype, attn_implementation="eager"))
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert model.config._attn_implementation == "eager"
    for name, tensor in llama().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(getattr(torch, dtype)))


def test_the_demo_model_is_loaded_like_others() -> None:
    config = configured("demo:tiny-chat", torch_dtype="bfloat16", data={"max_seq_length": 200})
    model, again = both(config), both(config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert model.config.max_position_embeddings == 200 and model.config._attn_implementation == "sdpa"


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    model = both(configured(saved(tmp_path, llama(tie_word_embeddings=True)), torch_dtype="bfloat16"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_with_eyes_is_loaded_for_its_text(tmp_path: Path) -> None:
    """What the folders of Qwen 3.5 and its like hold."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        "vocab_size": 430,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "pad_token_id": None,
    }
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=eyes))
    model = both(configured(saved(tmp_path, whole)))
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert torch.equal(
        model.model.layers[1].mlp.up_proj.weight, whole.model.language_model.layers[1].mlp.up_proj.weight
    )


def test_adapters(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    config = configured(folder, torch_dtype="bfloat16", lora={"rank": 4, "alpha": 12.0})
    torch.manual_seed(1)
    model = both(config)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    again = both(config)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert all("lora_" in name for name in trained) and not any("lm_head" in name for name in trained)
    assert len(trained) == 2 * 7 * 2
    assert all(torch.equal(dict(again.named_parameters())[name], each) for name, each in trained.items())
    assert model.peft_config["default"].lora_alpha == 12.0 and model.peft_config["default"].r == 4
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1)), "the program's own random numbers are as before"

    some = both(configured(folder, lora={"targets": ["q_proj", "o_proj"]}))
    assert sum(each.requires_grad for each in some.parameters()) == 2 * 2 * 2
    refused(
        lambda: both(configured(folder, lora={"targets": ["q_proj", "lm_head"]})),
        "leave the head out of model",
    )
    refused(lambda: both(configured(folder, lora={"targets": ["w9"]})), r"targets \['w9'\] cannot be added: ")


def test_only_the_backbone_is_compiled(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for model in (both(configured(folder, compile=True)), both(configured(folder, compile=True, lora={}))):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        compiled = [name for name, each in inner.named_modules() if each._compiled_call_impl is not None]
        assert compiled == ["model"]
    assert both(configured(folder)).model._compiled_call_impl is None


def test_packing_is_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.sft.data import packing

    config = configured(saved(tmp_path), data={"packing": True})
    both(config)
    monkeypatch.setattr(
        packing, "measure_isolation", lambda model: Isolation(own=1.0, leak=0.5, tolerance=1e-4)
    )
    refused(lambda: both(config), "lets packed documents see each other")


def test_more_tokens_than_the_model_has(tmp_path: Path) -> None:
    small = saved(tmp_path / "small", llama(vocab_size=300))
    refused(
        lambda: both(configured(small)), r"has \d+ tokens that the model does not, such as .*has 300 rows"
    )
    tokenizer = FAMILIES["chatml"].tokenizer()
    size = max(tokenizer.get_vocab().values()) + 1
    exact = saved(tmp_path / "exact", llama(vocab_size=size))
    model, tokenizer = both(configured(exact)), load_tokenizer(configured(exact))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    load_model(configured(exact), tokenizer)  # nothing that is trained on holds it
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|im_start|>'", "'<image>'")
    refused(
        lambda: load_model(configured(exact), tokenizer), f"1 tokens .* such as '<image>' .number {size};"
    )
    assert model.get_input_embeddings().num_embeddings == size


def test_what_is_no_causal_language_model(tmp_path: Path) -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaForSequenceClassification,
        T5Config,
        T5ForConditionalGeneration,
    )

    sizes = {"vocab_size": 430, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    bert = BertForMaskedLM(BertConfig(**sizes, intermediate_size=16))
    t5 = T5ForConditionalGeneration(
        T5Config(
            vocab_size=430, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=1, decoder_start_token_id=0
        )
    )
    for model in (bert, t5):
        name = type(model).__name__
        folder = saved(tmp_path / name, model)
        refused(
            lambda folder=folder: both(configured(folder)), f"is a {name}; a causal language model is needed"
        )
    judge = LlamaForSequenceClassification(llama(pad_token_id=0).config)
    refused(
        lambda: both(configured(saved(tmp_path / "judge", judge))),
        "lacks 1 of LlamaForCausalLM's weights, such as 'lm_head.weight'",
    )


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    refused(
        lambda: both(configured(folder, attn_implementation="flash_attention_2")),
        "the model '.*' could not be loaded: .*[Ff]lash",
    )
    tokenizer = load_tokenizer(configured(folder))
    (folder / "model.safetensors").unlink()
    refused(lambda: both(configured(folder)), "the model '.*' could not be loaded: .*model.safetensors")
    (folder / "config.json").unlink()
    refused(lambda: load_model(configured(folder), tokenizer), "holds no config.json; ")
    (folder / "adapter_config.json").write_text("{}")
    refused(lambda: load_model(configured(folder), tokenizer), "holds adapters alone; ")


def test_bf16_on_a_device_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P100")
    config = configured(saved(tmp_path), torch_dtype="bfloat16")
    refused(lambda: both(config), "bfloat16, which Tesla P100 cannot .* set model.torch_dtype to float32")


def test_liger_needs_its_package_and_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    config = configured(saved(tmp_path), use_liger_kernel=True)
    monkeypatch.setattr(transformers.utils, "is_liger_kernel_available", lambda: False)
    refused(lambda: both(config), "pip install liger-kernel, or set it to false")
    monkeypatch.setattr(transformers.utils, "is_liger_kernel_available", lambda: True)
    refused(lambda: both(config), "needs a CUDA device, and there is none")


def test_rows_longer_than_the_models_positions_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path)
    both(configured(folder))
    assert not caplog.records
    both(configured(folder, data={"max_seq_length": 65}))
    (record,) = caplog.records
    assert "max_seq_length is 65 and the model has positions for 64" in record.message


@pytest.mark.parametrize("length", [65, None])
def test_rows_longer_than_a_table_of_positions_are_refused(tmp_path: Path, length: int | None) -> None:
    """Where positions are looked up, a longer row would end the run in its middle."""
    folder = saved(tmp_path)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = GPT2Config(vocab_size=size, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    refused(lambda: both(configured(folder, data={"max_seq_length": length})), "table of 64 positions")
    both(configured(folder, data={"max_seq_length": 64}))


# -- sharded -----------------------------------------------------------------------------------------------


def test_sharding_needs_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, told in ((None, "one that no launcher started"), ("1", "this is one: ")):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if size:
            monkeypatch.setenv("WORLD_SIZE", size)
        config = configured("demo:tiny-chat", parallel="fsdp2")
        refused(
            lambda config=config: both(config), f"{told}.*torchrun --nproc_per_node=2 -m palingenesis train"
        )


_SHARDED = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from tests.sft.test_model import both, configured

dist.init_process_group("gloo")
for name in ("demo:tiny-chat", *sys.argv[1:]):
    for dtype in ("float32", "bfloat16"):
        whole = both(configured(name, torch_dtype=dtype))
        model = both(configured(name, torch_dtype=dtype, parallel="fsdp2", data={"packing": True}))
        for (key, here), (_, there) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            assert isinstance(here, DTensor), key
            assert here.to_local().numel() < there.numel(), key
            assert torch.equal(here.full_tensor(), there), key
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == model.config.tie_word_embeddings == ("tied" in name)
        ids = torch.arange(20)[None]
        with torch.no_grad():
            assert torch.equal(model(ids).logits, whole(ids).logits)
print("all as expected", flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads abort an interpreter on its way out now and then
"""


@pytest.mark.slow
def test_sharded_models_are_the_whole_ones_in_pieces(tmp_path: Path) -> None:
    folders = [saved(tmp_path / "plain"), saved(tmp_path / "tied", llama(tie_word_embeddings=True))]
    program = tmp_path / "sharded.py"
    program.write_text(_SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(program), *map(str, folders)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.count("all as expected") == 2, done.stderr[-4000:]


def _environment() -> dict[str, str]:
    import os

    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
