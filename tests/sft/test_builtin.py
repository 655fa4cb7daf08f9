"""The model, tokenizer and data that need no download."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.test_house import run as run_program

from palingenesis.errors import ConfigError, MissingExtraError
from palingenesis.sft.builtin import build_model, build_tokenizer, builtin_rows, is_builtin
from palingenesis.sft.data import Masker, Quarantine, Source, load_rows, normalize
from palingenesis.sft.data.prepare import prepare, samples_of


def test_conversations_are_whole_and_the_held_out_ones_are_others() -> None:
    train, held_out = builtin_rows("demo:chatterbot"), builtin_rows("demo:chatterbot-eval")
    assert len(train) > 700 and len(held_out) == (len(train) + len(held_out)) // 10
    for row in [*train, *held_out]:
        roles = [message.role for message in normalize(row)]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
    as_text = {str(row) for row in train}
    assert not any(str(row) in as_text for row in held_out)
    assert builtin_rows("demo:chatterbot") == train


def test_they_are_sources_like_others() -> None:
    source = Source("demo:chatterbot-eval", split="validation")
    assert source.title == "chatterbot-eval"
    assert Source("demo:chatterbot", name="talk").title == "talk"
    assert [row.data for row in load_rows(source)] == builtin_rows("demo:chatterbot-eval")
    assert is_builtin("demo:chatterbot") and not is_builtin("./demo:chatterbot")


def test_no_row_is_skipped() -> None:
    from palingenesis.sft.data import MaskOptions

    tokenizer, quarantine = build_tokenizer("demo:tiny-chat"), Quarantine(None)
    for name in ("demo:chatterbot", "demo:chatterbot-eval"):
        account = prepare(Source(name), tokenizer, quarantine, options=MaskOptions(max_length=512)).account
        assert account.used == account.read and account.loss_tokens > account.tokens / 4


def test_the_tokenizer_marks_answers_and_ends_them() -> None:
    tokenizer = build_tokenizer("demo:tiny-chat")
    masker = Masker(tokenizer)
    assert (masker.method, masker.end_of_turn) == ("generation marks", "<|end|>")
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token == "<|pad|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    (row,) = list(load_rows(Source("demo:chatterbot")))[:1]
    (sample,) = samples_of(row, Source("demo:chatterbot"), tokenizer, masker, None)
    trained = [label for label in sample.labels if label != -100]
    answer = builtin_rows("demo:chatterbot")[0]["messages"][1]["content"]
    assert tokenizer.decode(trained) == answer + "<|end|>"
    assert build_tokenizer("demo:tiny-chat").get_vocab() == tokenizer.get_vocab()


def test_the_model_fits_the_tokenizer_and_follows_the_seed() -> None:
    tokenizer = build_tokenizer("demo:tiny-chat")
    models = [
        build_model("demo:tiny-chat", tokenizer, seed=seed, max_length=300).state_dict() for seed in (1, 1, 2)
    ]
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert not torch.equal(models[0][name], models[2][name])
    model = build_model("demo:tiny-chat", tokenizer, seed=1, max_length=300)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert model.config.max_position_embeddings == 300
    assert model.config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        assert model(torch.arange(300)[None]).logits.isfinite().all()


def test_unknown_names_tell_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no 'demo:chat'; .* 'demo:chatterbot' and 'demo:chatterbot-eval'$"
    ):
        load_rows(Source("demo:chat"))
    with pytest.raises(ConfigError, match=r"no 'demo:llama'; .* there is 'demo:tiny-chat'$"):
        build_tokenizer("demo:llama")
    with pytest.raises(ConfigError, match=r"only the split 'train', not 'validation'; .*chatterbot-eval'$"):
        load_rows(Source("demo:chatterbot", split="validation"))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.sft import builtin

    builtin._all_conversations.cache_clear()
    monkeypatch.setitem(sys.modules, "chatterbot_corpus", None)
    with pytest.raises(MissingExtraError, match=r"palingenesis\[demo\]"):
        load_rows(Source("demo:chatterbot"))


def test_importing_it_imports_nothing_heavy() -> None:
    run_program("import palingenesis.sft.builtin", forbid=("torch", "transformers", "tokenizers", "datasets"))
