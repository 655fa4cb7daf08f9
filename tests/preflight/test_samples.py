"""The samples that are looked at are those of training, and each knows where it is from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cases.build import rows, save_model
from tests.preflight.conftest import ASKED, FOUR, MODEL, conversation

from palingenesis.errors import ConfigError
from palingenesis.preflight.samples import (
    Reader,
    Refused,
    Sample,
    batches,
    propose,
    rows_of,
    sources_of,
    wanted_messages,
)
from palingenesis.preflight.target import target_of, tokenizer_of
from palingenesis.preflight.tokens import runs_of, tokens_of
from palingenesis.sft.data import MaskOptions, Message, Quarantine, Source
from palingenesis.sft.stream import mask_options, training_stream

OPTIONS: list[list[tuple[str, str]]] = [
    [],
    [("data.last_turn_only", "true"), ("data.max_seq_length", "72")],
    [("data.packing", "true"), ("data.max_seq_length", "96")],
]


def samples(config: Any) -> tuple[Reader, list[Sample]]:
    reader = Reader(tokenizer_of(config), mask_options(config))
    found = []
    for source, row in rows_of(sources_of(config, "train"), None):
        made = reader.read(source, row)
        found += [] if isinstance(made, Refused) else made
    return reader, found


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "cut", "packed"])
def test_what_is_shown_is_what_training_sees(options: Any, write: Callable[..., Path]) -> None:
    config = target_of(None, options, MODEL, str(write(*rows(20, turns=2))))
    reader, found = samples(config)
    seen = [
        (document.ids.tolist(), document.labels.tolist())
        for batch in batches(found, config, reader.tokenizer)
        for document in batch.documents
    ]
    stream = training_stream(config, reader.tokenizer, Quarantine(None), world_size=1)
    trained = []
    for row in stream.dataset:
        start = 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            end = start + length
            trained.append((row["input_ids"][start:end], row["labels"][start:end]))
            start = end
    assert len(seen) > 10
    assert sorted(seen) == sorted(trained)


def test_packed_documents_know_their_row_and_begin_at_0(write: Callable[..., Path]) -> None:
    made = [*rows(9), rows(1)[0]]  # the last is a copy of the first
    config = target_of(None, OPTIONS[2], MODEL, str(write(*made)))
    reader, found = samples(config)
    (batch,) = batches(found, config, reader.tokenizer, size=100)
    documents = list(batch.documents)
    assert sorted(document.sample.line for document in documents) == list(range(1, 11))
    assert len(batch.rows) < 10
    assert batch.tensors["input_ids"].shape[0] == 1
    for document in documents:
        assert document.ids.tolist() == document.sample.encoded.input_ids
        assert np.array_equal(document.positions, np.arange(len(document.ids)))


def test_padded_rows_are_taken_apart_by_their_attention_mask(write: Callable[..., Path]) -> None:
    config = target_of(None, (), MODEL, str(write(*rows(5))))
    reader, found = samples(config)

    def left(given: Any) -> dict[str, Any]:
        import torch

        width = max(len(row["input_ids"]) for row in given)
        pads = [width - len(row["input_ids"]) for row in given]
        return {
            "input_ids": torch.tensor(
                [[0] * n + list(r["input_ids"]) for n, r in zip(pads, given, strict=True)]
            ),
            "labels": torch.tensor(
                [[-100] * n + list(r["labels"]) for n, r in zip(pads, given, strict=True)]
            ),
            "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads]),
        }

    (batch,) = batches(found, config, reader.tokenizer, size=5, collate=left)
    for document, sample in zip(batch.documents, found, strict=True):
        assert document.ids.tolist() == sample.encoded.input_ids


def test_every_token_knows_its_turn(write: Callable[..., Path]) -> None:
    made = {"messages": [{"role": "system", "content": "Be brief."}, ASKED, FOUR, ASKED, FOUR]}
    config = target_of(None, (), MODEL, str(write(made)))
    reader, found = samples(config)
    (batch,) = batches(found, config, reader.tokenizer)
    tokens = tokens_of(next(batch.documents), reader)

    by_turn: dict[tuple[int, str], str] = {}
    for token in tokens:
        by_turn[token.turn, token.role] = by_turn.get((token.turn, token.role), "") + token.text
    assert by_turn.pop((0, "template")).startswith("<|start|>system\n<|end|>")
    assert by_turn == {
        (1, "system"): "Be brief.",
        (2, "user"): "What is two plus two?",
        (3, "assistant"): "It is four.<|end|>",
        (4, "user"): "What is two plus two?",
        (5, "assistant"): "It is four.<|end|>",
    }
    assert "".join(token.text for token in tokens) == found[0].written
    assert [run[0].loss for run in runs_of(tokens)] == [False, True, False, True, False]


def test_characters_of_several_tokens_are_shown_once(write: Callable[..., Path]) -> None:
    made = conversation("naïve 東京 🙂?", "Paris: 東京 🙂!")
    config = target_of(None, (), MODEL, str(write(made)))
    reader, found = samples(config)
    (batch,) = batches(found, config, reader.tokenizer)
    tokens = tokens_of(next(batch.documents), reader)
    assert any(not token.text for token in tokens)
    assert "".join(token.text for token in tokens) == found[0].written


def test_a_merge_over_the_end_of_a_prompt_is_told(tmp_path: Path, write: Callable[..., Path]) -> None:
    spaced = (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ 'USER: ' + message['content'] + ' ASSISTANT: ' }}{% else %}{{ message['content'] + eos_token }}"
        "{% endif %}{% endfor %}"
    )
    save_model(tmp_path / "model", template=spaced)
    config = target_of(None, (), str(tmp_path / "model"), str(write(conversation("Hello", "the answer"))))
    reader, found = samples(config)
    (batch,) = batches(found, config, reader.tokenizer)
    tokens = tokens_of(next(batch.documents), reader)
    (noted,) = [token for token in tokens if token.note]
    assert noted.loss and "the answer".startswith(noted.text)
    assert "joined" in noted.note


def test_plain_text_is_text_throughout(write: Callable[..., Path]) -> None:
    path = write({"text": "The 東京 of France 🙂. " * 12})
    sources = f"[{{dataset: '{path}', mode: pretrain}}]"
    config = target_of(
        None,
        [("data.dataset", "null"), ("data.sources", sources), ("data.max_seq_length", "64")],
        MODEL,
        "unused",
    )
    reader, found = samples(config)
    assert len(found) > 1 and not found[0].messages
    tokens = tokens_of(next(next(batches(found, config, reader.tokenizer)).documents), reader)
    assert {token.role for token in tokens} == {"text"}
    assert "".join(token.text for token in tokens).startswith("The 東京 of France 🙂.")


def test_the_first_rows_of_every_source_by_weight(tmp_path: Path, write: Callable[..., Path]) -> None:
    one, two = write(*rows(50), name="one.jsonl"), write(*rows(50), name="two.jsonl")
    sources = [Source(str(one), weight=3.0), Source(str(two), weight=1.0)]
    taken = [row.source for _, row in rows_of(sources, 20)]
    assert (taken.count("one"), taken.count("two")) == (15, 5)
    assert len(list(rows_of(sources, None))) == 100
    with pytest.raises(ConfigError, match="holds no row"):
        list(rows_of([Source(str(write(name="none.jsonl")))], 5))


@pytest.mark.parametrize(
    ("row", "proposed"),
    [
        ({"id": 3, "dialog": [ASKED, FOUR]}, "set data.messages_field to dialog"),
        ({"turns": [{"from": "human", "value": "Hi"}]}, "set data.messages_field to turns"),
        ({"question": "a", "answer": "b"}, "rename the field question to prompt and answer to completion"),
        ({"mesages": 1}, "rename the field mesages to messages"),
        ({"text": "Once"}, "for plain text list the file under data.sources with mode: pretrain"),
        ({"messages": None}, ""),
        ({"messages": []}, ""),
        ({"x": "y"}, ""),
    ],
)
def test_the_field_that_was_likely_meant(row: dict[str, Any], proposed: str) -> None:
    assert propose(Source("rows.jsonl"), row) == proposed


def test_which_messages_are_to_be_trained_by_the_options_alone() -> None:
    messages = [
        Message("user", "a"),
        Message("assistant", "b", trained=False),
        Message("user", "c"),
        Message("assistant", ""),
        Message("tool", " "),
        Message("tool", "d"),
        Message("assistant", "e"),
    ]
    assert wanted_messages(messages, MaskOptions()) == [3, 6]
    assert wanted_messages(messages, MaskOptions(include_observations=True)) == [3, 5, 6]
    assert wanted_messages(messages[:2] + messages[:2], MaskOptions(last_turn_only=True)) == []
