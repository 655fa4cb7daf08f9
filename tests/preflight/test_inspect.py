"""What ``pgs inspect`` shows: marks that survive a pipe, everything visible, and the same as JSON."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.cases.build import rows
from tests.preflight.conftest import MODEL, conversation

from palingenesis.errors import ConfigError
from palingenesis.preflight.inspect import as_report, inspect
from palingenesis.preflight.inspect_text import ASCII, UNICODE, print_inspection, visible
from palingenesis.preflight.target import target_of
from palingenesis.preflight.validate import validate

ODD = conversation("Hi  ", "Paris:\t東京 🙂!\n\nBye\u200b", "And\x1b[31m?", "x")


def looked_at(path: Path, *options: tuple[str, str], **how: Any) -> Any:
    return inspect(target_of(None, options, MODEL, str(path)), **how)


def printed(found: Any, *, terminal: bool = False, **how: Any) -> str:
    out = io.StringIO()
    print_inspection(found, Console(file=out, force_terminal=terminal, width=80), **how)
    return out.getvalue()


def test_marks_that_need_no_colour(write: Callable[..., Path]) -> None:
    text = printed(looked_at(write(conversation("Hi", "Hello there."))), table=False)
    assert text.splitlines()[3:] == [
        "<|start|>user↵",
        "Hi<|end|>↵",
        "<|start|>assistant↵",
        "⟦Hello there.<|end|>⟧↵",
        "",
    ]
    assert "\x1b" not in text
    assert re.search(r"sample 1 \(rows\): \d+ of \d+ tokens bear loss \(\d+%\); .*rows.jsonl line 1", text)


def test_everything_is_visible(write: Callable[..., Path]) -> None:
    path = write(ODD)
    text = printed(looked_at(path), table=False)
    assert "Hi··<|end|>↵" in text
    assert "⟦Paris:⇥東京 🙂!↵\n↵\nBye\\u200b<|end|>⟧↵" in text
    assert "And\\x1b[31m?" in text
    plain = printed(looked_at(path), table=True, ascii=True)
    assert plain.isascii()
    assert "[[Paris:\\t\\u6771\\u4eac \\U0001f642!\\n\n\\n\nBye\\u200b<|end|>]]\\n" in plain


def test_colour_on_a_terminal_and_the_same_characters(write: Callable[..., Path]) -> None:
    found = looked_at(write(ODD))
    coloured = printed(found, terminal=True, table=False)
    assert "\x1b[" in coloured
    assert "⟦" in coloured and "⟧" in coloured


def test_the_table_has_every_token(write: Callable[..., Path]) -> None:
    found = looked_at(write(conversation("Hi", "Hello there.")))
    lines = printed(found).splitlines()
    start = next(at for at, line in enumerate(lines) if line.lstrip().startswith("position"))
    table = lines[start + 1 :]
    assert len(table) == len(found.shown[0].tokens)
    for token, line in zip(found.shown[0].tokens, table, strict=True):
        assert line.split()[0] == str(token.position)
        assert str(token.id) in line
        assert ("LOSS" in line) == token.loss and ("masked" in line) != token.loss
    assert any("2 assistant" in line and "LOSS" in line for line in table)
    assert any("1 user" in line and "masked" in line for line in table)


def test_packed_rows_have_documents_and_position_ids(write: Callable[..., Path]) -> None:
    options = (("data.packing", "true"), ("data.max_seq_length", "128"))
    found = looked_at(write(*rows(12)), *options, num_samples=1)
    (shown,) = found.shown
    assert len(shown.places) > 1
    assert {token.document for token in shown.tokens} == set(range(1, len(shown.places) + 1))
    assert [token.position for token in shown.tokens] == list(range(len(shown.tokens)))
    begins = [token for token in shown.tokens if token.position_id == 0]
    assert len(begins) == len(shown.places) and not any(token.loss for token in begins)
    text = printed(found)
    assert "--- document 2 ---" in text
    assert "pos id" in text


def test_rows_by_their_number(write: Callable[..., Path]) -> None:
    path = write(*rows(8))
    found = looked_at(path, indices=[3, 7])
    assert [shown.places[0].rsplit(" ", 1)[1] for shown in found.shown] == ["3", "7"]
    with pytest.raises(ConfigError, match="there is no row 9 in"):
        looked_at(path, indices=[9])


def test_a_row_that_is_left_out_says_why(write: Callable[..., Path]) -> None:
    found = looked_at(write(conversation("Hi", "Hello."), conversation("Hi")))
    assert len(found.shown) == 1
    assert "line 2 is not trained on: the conversation ends with user" in printed(found)
    report = as_report(found)
    assert report.facts["refused"][0]["kind"] == "role_order"
    (finding,) = report.findings
    assert finding.check == "data.role_order" and finding.evidence["lines"] == [2]
    assert finding.message.startswith("1 of 2 samples") and report.code == 1


@pytest.mark.parametrize(
    ("row", "check"),
    [
        ("{", "data.broken_json"),
        ({"text": 3}, "data.missing_field"),
        (conversation("Hi", " "), "data.empty_answer"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": 3}]},
            "data.bad_value",
        ),
    ],
)
def test_what_is_found_is_what_validate_finds(row: Any, check: str, write: Callable[..., Path]) -> None:
    config = target_of(None, (), MODEL, str(write(*rows(4), row)))
    looked = as_report(inspect(config)).findings
    assert [finding.check for finding in looked] == [check]
    assert looked == validate(config).findings


def test_json_holds_what_the_text_shows(write: Callable[..., Path]) -> None:
    found = looked_at(write(conversation("Hi", "Hello there.")))
    document = as_report(found).facts
    (sample,) = document["samples"]
    assert sample["tokens"] == len(sample["table"]) and sample["loss_tokens"] < sample["tokens"]
    trained = "".join(token["text"] for token in sample["table"] if token["loss"])
    assert trained == "Hello there.<|end|>"
    assert {token["turn"] for token in sample["table"] if token["role"] == "user"} == {1}
    assert {token["position_id"] for token in sample["table"]} == set(range(sample["tokens"]))


def test_how_many(write: Callable[..., Path]) -> None:
    path = write(*rows(8))
    assert len(looked_at(path).shown) == 5
    assert len(looked_at(path, num_samples=2).shown) == 2
    with pytest.raises(ConfigError, match="at least 1"):
        looked_at(path, num_samples=0)
    with pytest.raises(ConfigError, match="there is no evaluation data"):
        looked_at(path, split="eval")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        (" a ", "·a·"),
        ("   ", "···"),
        ("\n", "↵"),
        ("\t", "⇥"),
        ("\r\x00\u202e\ufeff", "\\r\\x00\\u202e\\ufeff"),
        ("\u00a0", "\\xa0"),
        ("é東🙂", "é東🙂"),
    ],
)
def test_what_cannot_be_seen_is_spelled(text: str, shown: str) -> None:
    assert visible(text, UNICODE, edges=(True, True)) == shown
    assert visible(text, ASCII).isascii()
