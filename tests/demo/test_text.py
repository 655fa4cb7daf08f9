"""The demonstration's data: where it comes from, and that it is the same every time."""

from __future__ import annotations

from importlib import resources
from itertools import islice

import pytest

from palingenesis.demo.corpus import load_conversations, require
from palingenesis.demo.tokens import END_OF_TURN, VOCABULARY, batches, token_blocks, train_tokenizer
from palingenesis.errors import MissingExtraError

BLOCK = 64


def test_conversations_are_those_of_the_package() -> None:
    conversations = load_conversations()
    humor = (resources.files("chatterbot_corpus") / "data" / "english" / "humor.yml").read_text("utf-8")

    assert len(conversations) > 800
    assert all(isinstance(turn, str) for turns in conversations for turn in turns)
    assert sum(turns[0] in humor for turns in conversations) >= 20


def test_conversations_come_once_each_and_in_the_same_order() -> None:
    conversations = load_conversations()
    assert len({tuple(turns) for turns in conversations}) == len(conversations)
    assert load_conversations() == conversations


def test_nothing_comes_over_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the demonstration's data must not come over a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert load_conversations()


def test_tokenizer_gives_the_text_back() -> None:
    tokenizer = train_tokenizer(load_conversations())
    text = "What is AI? Ünïcode, too."

    assert 1000 <= tokenizer.get_vocab_size() <= VOCABULARY
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode(f"yes{END_OF_TURN}").tokens[-1] == END_OF_TURN


def test_batches_depend_on_the_seed_alone() -> None:
    import torch

    conversations = load_conversations()[:200]
    blocks = token_blocks(conversations, train_tokenizer(conversations), BLOCK)
    torch.manual_seed(1)
    first = list(islice(batches(blocks, 4, seed=0), 5))
    torch.manual_seed(2)
    second = list(islice(batches(blocks, 4, seed=0), 5))
    other = list(islice(batches(blocks, 4, seed=1), 5))

    assert blocks.shape[1] == BLOCK
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_an_epoch_shows_every_block_once() -> None:
    import torch

    blocks = torch.arange(12).view(6, 2)
    epoch = torch.cat(list(islice(batches(blocks, 2, seed=3), 3)))
    assert sorted(epoch[:, 0].tolist()) == blocks[:, 0].tolist()


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'palingenesis\[demo\]'") as caught:
        require("a_package_that_nobody_has")
    assert "\n" not in str(caught.value)
