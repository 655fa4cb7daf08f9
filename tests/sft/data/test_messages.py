"""Rows in every usual form come out as the same messages; rows in none are refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palingenesis.sft.data import BadRow, Message, normalize, text_of, tools_of

QUESTION, ANSWER = Message("user", "What is two plus two?"), Message("assistant", "It is four.")
BRIEF = Message("system", "Be brief.")


def turns(*pairs: tuple[str, Any], keys: tuple[str, str] = ("role", "content")) -> list[dict[str, Any]]:
    return [dict(zip(keys, pair, strict=True)) for pair in pairs]


PLAIN = turns(("user", QUESTION.content), ("assistant", ANSWER.content))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"messages": PLAIN}, None),
        ({"messages": json.dumps(PLAIN)}, None),
        ({"chat": PLAIN, "messages": None}, "chat"),
        ({"messages": [dict(turn, tool_calls=None, name=None) for turn in PLAIN]}, None),
        (
            {
                "messages": [
                    {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in PLAIN
                ]
            },
            None,
        ),
        ({"prompt": QUESTION.content, "completion": ANSWER.content}, None),
        ({"prompt": PLAIN[:1], "completion": PLAIN[1:]}, None),
        *[
            (
                {
                    "conversations": turns(
                        (asks, QUESTION.content), (answers, ANSWER.content), keys=("from", "value")
                    )
                },
                None,
            )
            for asks, answers in (("human", "gpt"), ("user", "assistant"), ("Human", "chatgpt"))
        ],
    ],
)
def test_the_forms(row: dict[str, Any], field: str | None) -> None:
    assert normalize(row, field) == [QUESTION, ANSWER]


def test_a_system_message_within_or_beside_the_messages() -> None:
    within = turns(("system", BRIEF.content), ("human", QUESTION.content), ("gpt", ANSWER.content))
    developer = turns(("developer", BRIEF.content), ("user", QUESTION.content), ("assistant", ANSWER.content))
    for row in ({"messages": within}, {"messages": developer}, {"system": BRIEF.content, "messages": PLAIN}):
        assert normalize(row) == [BRIEF, QUESTION, ANSWER]


def test_tool_calls_of_openai_and_of_sharegpt_are_the_same() -> None:
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    called = {"id": "c1", "type": "function", "function": {**function, "arguments": '{"city": "Paris"}'}}
    openai = [
        PLAIN[0],
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        PLAIN[1],
    ]
    sharegpt = turns(
        ("human", QUESTION.content),
        ("function_call", json.dumps(function)),
        ("observation", "rain"),
        ("gpt", ANSWER.content),
        keys=("from", "value"),
    )
    for row in ({"messages": openai}, {"conversations": sharegpt}):
        found = normalize(row)
        assert [message.role for message in found] == ["user", "assistant", "tool", "assistant"]
        assert found[1].tool_calls[0]["function"] == function
        assert found[1].content == ""
    assert normalize({"messages": openai})[2].tool_call_id == "c1"


def test_reasoning_and_weight() -> None:
    thought = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two.", "weight": 0}
    (_, answer) = normalize({"messages": [PLAIN[0], thought]})
    assert answer == Message("assistant", "Four.", reasoning="Two and two.", trained=False)
    assert answer.as_dict() == {
        "role": "assistant",
        "content": "Four.",
        "reasoning_content": "Two and two.",
    }


U, A, T, S = ("user", "u"), ("assistant", "a"), ("tool", "t"), ("system", "s")


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ([A, U, A], "message 1 is by assistant, at the start"),
        ([U, U, A], "message 2 is by user, after user"),
        ([U, A, A], "message 3 is by assistant, after assistant"),
        ([S, A], "message 2 is by assistant, after system"),
        ([U, S, A], "message 2 is by system, after user"),
        ([U, T, A], "message 2 is by tool, after user"),
        ([U, A, T, U, A], "message 4 is by user, after tool"),
        ([U, A, U], "ends with user"),
        ([U, A, T], "ends with tool"),
        ([S], "ends with system"),
    ],
)
def test_orders_that_no_conversation_has(order: list[tuple[str, str]], told: str) -> None:
    with pytest.raises(BadRow, match=told) as caught:
        normalize({"messages": turns(*order)})
    assert caught.value.kind == "role_order"


@pytest.mark.parametrize(
    ("row", "kind", "told"),
    [
        (
            {"chat": []},
            "missing_field",
            "no field messages, conversations, conversation or prompt; it has chat",
        ),
        ({}, "missing_field", "it has none"),
        ({"messages": []}, "missing_field", "an empty list"),
        ({"messages": "hello"}, "bad_value", "no JSON list"),
        ({"messages": 3}, "bad_value", "a list of messages is needed"),
        ({"messages": ["hello"]}, "bad_value", "message 1 is hello; an object is needed"),
        ({"prompt": "Hi"}, "missing_field", "no field completion"),
        ({"messages": [{"content": "Hi"}]}, "missing_field", "message 1 has no 'role'; it has content"),
        ({"messages": [{"role": "user"}]}, "missing_field", "message 1 has no 'content'; it has role"),
        ({"messages": turns(("narrator", "Hi"))}, "bad_value", "unknown role narrator"),
        ({"messages": turns(U, ("assistant", " \n"))}, "empty_answer", "message 2 is an answer without text"),
        ({"messages": turns(U, ("assistant", 3))}, "bad_value", "message 2 is 3; text is needed"),
        ({"messages": turns(U, ("assistant", [{"type": "image"}]))}, "bad_value", "a part that is not text"),
        (
            {"messages": [*turns(U), {"role": "assistant", "content": "a", "weight": 0.5}]},
            "bad_value",
            "0 or 1",
        ),
        (
            {"conversations": turns(U, ("function_call", "weather()"))},
            "bad_value",
            "a tool call that is no JSON",
        ),
        (
            {"messages": [*turns(U), {"role": "assistant", "tool_calls": [{}]}]},
            "bad_value",
            "no name of a function",
        ),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], kind: str, told: str) -> None:
    with pytest.raises(BadRow, match=told) as caught:
        normalize(row)
    assert caught.value.kind == kind
    assert "\n" not in caught.value.reason


def test_a_field_that_is_asked_for_and_missing() -> None:
    with pytest.raises(BadRow, match="no field chat; it has messages"):
        normalize({"messages": PLAIN}, "chat")
    with pytest.raises(BadRow, match="field 'chat' is null; a list of messages is needed"):
        normalize({"messages": PLAIN, "chat": None}, "chat")
    with pytest.raises(BadRow, match="field 'messages' is null"):
        normalize({"messages": None})


def test_plain_text() -> None:
    assert (
        text_of({"text": "Once upon a time"})
        == text_of({"content": "Once upon a time"})
        == "Once upon a time"
    )
    assert text_of({"text": "no", "story": "yes"}, "story") == "yes"
    for row, told in (
        ({"text": " "}, "text is needed"),
        ({"text": 3}, "is 3"),
        ({"body": "x"}, "it has body"),
    ):
        with pytest.raises(BadRow, match=told):
            text_of(row)


def test_tools() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "description": None}}]
    assert tools_of({"tools": tools}) == tools_of({"tools": json.dumps(tools)})
    assert tools_of({"tools": tools}) == [{"type": "function", "function": {"name": "weather"}}]
    assert tools_of({}) is None and tools_of({"tools": []}) is None and tools_of({"tools": ""}) is None
    with pytest.raises(BadRow, match="a list of objects is needed"):
        tools_of({"tools": ["weather"]})
