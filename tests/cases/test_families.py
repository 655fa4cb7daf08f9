"""Every family with every kind of conversation: the answers are trained, or the refusal says why not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.cases.families import FAMILIES, MESSAGES, SAMPLES, TEMPLATES
from tests.sft.data.chats import make_tokenizer, trained_text

from palingenesis.preflight.samples import Document, Reader, Refused, batches
from palingenesis.preflight.target import target_of
from palingenesis.preflight.validate_work import Examiner
from palingenesis.sft.data import MaskOptions, Row, Source

SOURCE = Source("rows.jsonl")
CONFIG = target_of(None, (), "demo:tiny-chat", "rows.jsonl")


def row(kind: str, number: int = 1) -> Row:
    return Row("rows", "rows.jsonl", number, {"messages": MESSAGES[kind]})


def trained(tokenizer: Any, kind: str) -> list[str]:
    """What bears loss in the collated batch, stretch by stretch."""
    found = Reader(tokenizer, MaskOptions(max_length=8192)).read(SOURCE, row(kind))
    assert not isinstance(found, Refused), found.problem.reason
    (batch,) = batches(found, CONFIG, tokenizer)
    (document,) = batch.documents
    assert isinstance(document, Document)
    encoded = found[0].encoded
    assert document.labels.tolist() == encoded.labels
    return [text.strip() for text in trained_text(tokenizer, encoded)]


def test_there_are_twelve_families_and_each_template_is_used() -> None:
    assert len(FAMILIES) >= 12
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)


@pytest.mark.parametrize(("name", "kind"), product(FAMILIES, SAMPLES))
def test_the_round_trip_holds_or_the_refusal_says_why(name: str, kind: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    tally = Examiner(CONFIG, tokenizer, "train").examine([(SOURCE, row(kind))])
    if kind in family.refused:
        (check,) = tally.seen
        assert check == "masking.rows_refused"
        assert family.refused[kind] in tally.seen[check].example
        return
    assert tally.seen == {}

    # The same once more, told by the words that must be there.
    texts = trained(tokenizer, kind)
    answers = [message for message in MESSAGES[kind] if message["role"] == "assistant"]
    assert len(texts) == len(answers)
    for text, answer in zip(texts, answers, strict=True):
        assert text.endswith(family.end)
        body = text.removesuffix(family.end).strip()
        if answer.get("tool_calls"):
            assert "weather" in body and '"Paris"' in body
        else:
            said = answer["content"].split("</think>")[-1].strip()
            assert body == said or (kind == "reasoning" and body.endswith(said) and "Two and two." in body)
        assert "two plus two" not in body


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_shifted_by_one_token_is_seen_in_every_family(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()

    def late(samples: Any) -> dict[str, Any]:
        import torch

        labels = torch.tensor([list(sample["labels"]) for sample in samples])
        labels[0, (labels[0] != -100).nonzero()[0]] = -100
        return {
            "input_ids": torch.tensor([list(sample["input_ids"]) for sample in samples]),
            "labels": labels,
        }

    tally = Examiner(CONFIG, tokenizer, "train", late).examine([(SOURCE, row("single"))])
    assert list(tally.seen) == ["masking.round_trip"]


#: What any text at all may be left out for.
REASONS = {"data.empty_answer", "data.control_token", "masking.rows_refused"}


def seen_in(tokenizer: Any, contents: list[str], max_length: int) -> set[str]:
    """What is seen in a conversation of these turns, besides reasons to leave it out."""
    config = target_of(None, [("data.max_seq_length", str(max_length))], "demo:tiny-chat", "rows.jsonl")
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    made = Row("rows", "rows.jsonl", 1, {"messages": messages})
    tally = Examiner(config, tokenizer, "train").examine([(SOURCE, made)])
    odd = {"data.mojibake", "data.control_characters", "masking.no_loss_tokens"}
    return set(tally.seen) - REASONS - odd


TURNS = st.lists(st.text(min_size=1, max_size=30).filter(str.strip), min_size=2, max_size=6).map(
    lambda contents: contents[: len(contents) // 2 * 2]
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(contents=TURNS, max_length=st.sampled_from([24, 48, 8192]))
def test_no_text_whatever_makes_a_false_alarm(name: str, contents: list[str], max_length: int) -> None:
    assert seen_in(FAMILIES[name].tokenizer(), contents, max_length) == set()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(contents=TURNS, max_length=st.sampled_from([24, 48, 8192]))
def test_nor_does_a_tokenizer_that_marks_words_by_a_leading_bar(contents: list[str], max_length: int) -> None:
    family = FAMILIES["llama2"]
    tokenizer = make_tokenizer(family.template, family.tokens, bos="<s>", eos="</s>", metaspace=True)
    assert seen_in(tokenizer, contents, max_length) == set()


@pytest.mark.parametrize("option", ["last_turn_only", "include_observations", "no_reasoning", "packing"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_option_makes_a_false_alarm(name: str, option: str) -> None:
    family = FAMILIES[name]
    options = {
        "last_turn_only": [("data.last_turn_only", "true")],
        "include_observations": [("data.include_observations", "true")],
        "no_reasoning": [("data.train_on_reasoning", "false")],
        "packing": [("data.packing", "true"), ("data.max_seq_length", "4096")],
    }[option]
    config = target_of(None, options, "demo:tiny-chat", "rows.jsonl")
    made = [(SOURCE, row(kind, number)) for number, kind in enumerate(SAMPLES, start=1)]
    tally = Examiner(config, family.tokenizer(), "train").examine(made)
    refused = tally.seen.pop("masking.rows_refused", None)
    assert tally.seen == {}
    assert (refused.count if refused else 0) >= len(family.refused)
    assert len(tally.length) + (refused.count if refused else 0) == len(SAMPLES)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_holds_the_end_of_a_turn_is_left_out(name: str) -> None:
    family = FAMILIES[name]
    answer = {"role": "assistant", "content": f"It is {family.end} four."}
    made = Row("rows", "rows.jsonl", 1, {"messages": [MESSAGES["single"][0], answer]})
    tally = Examiner(CONFIG, family.tokenizer(), "train").examine([(SOURCE, made)])
    assert list(tally.seen) == ["data.control_token"]
