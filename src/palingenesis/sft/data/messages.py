"""From a row in any of the usual forms to a list of messages in one form, and what is wrong with it.

Understood are OpenAI's (``messages`` of ``role`` and ``content``), ShareGPT's (``conversations`` of
``from`` and ``value``) and ``prompt`` with ``completion``, each as text or as messages. Plain text, for
``mode: pretrain``, is read by ``text_of``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palingenesis.sft.data.rows import BadRow

Role = Literal["system", "user", "assistant", "tool"]

#: What each name of a role stands for; ``call`` is an assistant's message that is nothing but a tool call.
ROLES: dict[str, Role | Literal["call"]] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai"), "assistant"),
    **dict.fromkeys(
        ("tool", "function", "observation", "ipython", "tool_response", "function_response"), "tool"
    ),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
MESSAGE_FIELDS = ("messages", "conversations", "conversation")
TEXT_FIELDS = ("text", "content")
_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Who may speak after whom.
_FOLLOWS: dict[Role | None, tuple[Role, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


@dataclass(frozen=True)
class Message:
    """One turn. ``trained`` is false for an answer that the row itself gives weight 0."""

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    trained: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates expect it, without the fields it does not have."""
        given = {
            "reasoning_content": self.reasoning,
            "tool_calls": [dict(call) for call in self.tool_calls] or None,
            "name": self.name,
            "tool_call_id": self.tool_call_id,
        }
        kept = {key: value for key, value in given.items() if value is not None}
        return {"role": self.role, "content": self.content, **kept}


def normalize(row: Mapping[str, Any], messages_field: str | None = None) -> list[Message]:
    """The conversation that ``row`` holds.

    Raises:
        BadRow: a field is missing or of the wrong kind, the roles come in an order that no conversation
            has, or an answer is empty.
    """
    messages = [
        _message(entry, number) for number, entry in enumerate(_entries(row, messages_field), start=1)
    ]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    _check_order(messages)
    for number, message in enumerate(messages, start=1):
        if message.role == "assistant" and not message.content.strip() and not message.tool_calls:
            raise BadRow("empty_answer", f"message {number} is an answer without text")
    return messages


def text_of(row: Mapping[str, Any], text_field: str | None = None) -> str:
    """The plain text that ``row`` holds.

    Raises:
        BadRow: there is none.
    """
    for name in (text_field,) if text_field else TEXT_FIELDS:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value
        if value is not None:
            raise BadRow("bad_value", f"field {name!r} is {_shown(value)}; text is needed")
    raise _missing(row, text_field or " or ".join(TEXT_FIELDS))


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The descriptions of tools that came with the conversation, for the chat template."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow("bad_value", f"field 'tools' is {_shown(tools)}; a list of objects is needed")
    return [without_nulls(tool) for tool in tools]


def without_nulls(value: Any) -> Any:
    """``value`` without the keys whose value is null, which column files add to every row."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value


def _entries(row: Mapping[str, Any], messages_field: str | None) -> list[Any]:
    for name in (messages_field,) if messages_field else MESSAGE_FIELDS:
        if row.get(name) is not None:
            return _listed(row[name], name)
    if messages_field is None and row.get("prompt") is not None:
        if row.get("completion") is None:
            raise _missing(row, "completion")
        return _half(row["prompt"], "prompt", "user") + _half(row["completion"], "completion", "assistant")
    asked = (messages_field,) if messages_field else MESSAGE_FIELDS
    if (empty := next((name for name in asked if name in row), None)) is not None:
        raise BadRow("missing_field", f"field {empty!r} is null; a list of messages is needed")
    raise _missing(row, messages_field or f"{', '.join(MESSAGE_FIELDS)} or prompt")


def _listed(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        value = _parsed(value, name)
    if not isinstance(value, Sequence):
        raise BadRow("bad_value", f"field {name!r} is {_shown(value)}; a list of messages is needed")
    if not value:
        raise BadRow("missing_field", f"field {name!r} is an empty list")
    return list(value)


def _half(value: Any, name: str, role: Role) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, name)


def _parsed(value: str, name: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        raise BadRow("bad_value", f"field {name!r} is {_shown(value)}, which is no JSON list") from None


def _message(entry: Any, number: int) -> Message:
    if not isinstance(entry, Mapping):
        raise BadRow("bad_value", f"message {number} is {_shown(entry)}; an object is needed")
    named = next((entry[key] for key in _ROLE_KEYS if entry.get(key) is not None), None)
    if named is None:
        raise BadRow("missing_field", f"message {number} has no 'role'; it has {_keys(entry)}")
    role = ROLES.get(str(named).lower())
    if role is None:
        raise BadRow("bad_value", f"message {number} has the unknown role {_shown(named)}")
    value = next((entry[key] for key in _CONTENT_KEYS if entry.get(key) is not None), None)
    if role == "call":
        return Message("assistant", "", tool_calls=_calls_in_text(value, number))
    calls = _calls(entry.get("tool_calls") or (), number)
    if value is None and not calls:
        if any(key in entry for key in _CONTENT_KEYS):
            raise BadRow("bad_value", f"message {number} has null for its content; text is needed")
        raise BadRow("missing_field", f"message {number} has no 'content'; it has {_keys(entry)}")
    return Message(
        role,
        _text(value, number),
        reasoning=next((entry[key] for key in _REASONING_KEYS if isinstance(entry.get(key), str)), None),
        tool_calls=calls,
        name=entry.get("name"),
        tool_call_id=entry.get("tool_call_id"),
        trained=_trained(entry.get("weight"), number),
    )


def _text(value: Any, number: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
        raise BadRow("bad_value", f"message {number} holds a part that is not text")
    raise BadRow("bad_value", f"the content of message {number} is {_shown(value)}; text is needed")


def _trained(weight: Any, number: int) -> bool:
    if weight is None:
        return True
    if weight in (0, 1):
        return bool(weight)
    raise BadRow("bad_value", f"message {number} has weight {_shown(weight)}; 0 or 1 is understood")


def _calls(value: Any, number: int) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        value = _parsed(value, "tool_calls")
    if not isinstance(value, Sequence) or not all(isinstance(call, Mapping) for call in value):
        raise BadRow("bad_value", f"the tool calls of message {number} are no list of objects")
    return tuple(_call(call, number) for call in value)


def _call(call: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """A tool call with its arguments as an object: OpenAI's API hands them out as a string of JSON."""
    call = without_nulls(call)
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow("bad_value", f"a tool call of message {number} has no name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise BadRow(
                "bad_value", f"a tool call of message {number} has arguments that are no JSON"
            ) from None
    kept = {key: call[key] for key in ("id",) if key in call}
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}


def _calls_in_text(value: Any, number: int) -> tuple[Mapping[str, Any], ...]:
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            raise BadRow("bad_value", f"message {number} is a tool call that is no JSON") from None
    return _calls([found] if isinstance(found, Mapping) else found, number)


def _check_order(messages: list[Message]) -> None:
    before: Role | None = None
    for number, message in enumerate(messages, start=1):
        if message.role not in _FOLLOWS[before]:
            after = f"after {before}" if before else "at the start"
            raise BadRow("role_order", f"message {number} is by {message.role}, {after}")
        before = message.role
    if before != "assistant":
        raise BadRow("role_order", f"the conversation ends with {before}, not with an answer")


def _missing(row: Mapping[str, Any], name: str) -> BadRow:
    return BadRow("missing_field", f"the row has no field {name}; it has {_keys(row)}")


def _keys(row: Mapping[str, Any]) -> str:
    return _shown(", ".join(str(key) for key in row) or "none")


def _shown(value: Any) -> str:
    line = " ".join((value if isinstance(value, str) else repr(value)).split())
    return line if len(line) <= 60 else line[:59] + "…"
