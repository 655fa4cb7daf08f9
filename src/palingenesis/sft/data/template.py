"""A tokenizer's chat template: rendering, and the exact place of every answer in what it renders.

Two ways lead to the places. Where the template marks answers with ``{% generation %}``, it says itself.
Otherwise a conversation is rendered whole, and once more up to each answer with the prompt that asks for
one: the whole must begin with that, and the answer begins where it ends. The answer ends with the first
end-of-turn token, which must come before the next message begins; where that is, is found by rendering the
conversation again with another text in the next message. A template with which either does not hold is
refused, and so is one that ends an answer with no token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from palingenesis.errors import ConfigError
from palingenesis.sft.data.messages import Message
from palingenesis.sft.data.reasoning import find_reasoning, is_mark, without_opening
from palingenesis.sft.data.rows import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A text that no template takes apart; made longer where a conversation holds it.
_STAND_IN = "zqkxj7vwstandin3bhq"
_FIRST, _SECOND = Message("user", "qzfirstquestion"), Message("user", "qzsecondquestion")
_ANSWER, _LAST_ANSWER = Message("assistant", "qzfirstanswer"), Message("assistant", "qzsecondanswer")
_ASKED_ONCE = (_FIRST, _ANSWER)
_ASKED_TWICE = (_FIRST, _ANSWER, _SECOND, _LAST_ANSWER)


class RefusedTemplate(ConfigError):
    """The chat template cannot be trained with; ``two_beginnings``: because it begins a text twice."""

    def __init__(self, message: str, *, two_beginnings: bool = False) -> None:
        super().__init__(message)
        self.two_beginnings = two_beginnings


@dataclass(frozen=True)
class Place:
    """Where message ``index`` is answered in the rendered text, from after its header to its end of turn."""

    index: int
    start: int
    end: int


class ChatTemplate:
    """The chat template of a tokenizer, checked once.

    Args:
        tokenizer: any of transformers' fast tokenizers.
        only_last: whether only the last turn matters; earlier ones then need no certain place.

    Raises:
        ConfigError: there is no template.
        RefusedTemplate: it cannot be said for certain which of its tokens are answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, only_last: bool = False) -> None:
        self._tokenizer = tokenizer
        self.marked = _has_marks(_source(tokenizer))
        self._added = sorted(filter(None, tokenizer.get_added_vocab()), key=len, reverse=True)
        self._header_is_marked = False
        probe = _ASKED_ONCE if only_last else _ASKED_TWICE
        try:
            ends = self._find_end_of_turn(probe)
            self.end_of_turn = "".join(ends)
            special = {*map(str, tokenizer.all_special_tokens), *ends}
            # What ends a turn here may close the reasoning of another family.
            self._control = sorted(
                token for token in special if token and (token in ends or not is_mark(token))
            )
            self._check(probe)
        except BadRow as problem:
            raise RefusedTemplate(f"the chat template is refused: {problem.reason}") from None

    def render(
        self, messages: Sequence[Message], *, tools: list[Any] | None = None, ask: bool = False
    ) -> str:
        """The text of ``messages``, with the header of the next answer if ``ask``.

        Raises:
            BadRow: the template does not take these messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [message.as_dict() for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=ask,
            )
        except Exception as error:  # noqa: BLE001 - a template may raise whatever its expressions can
            raise BadRow("template", f"the chat template does not take it: {error}") from None
        return str(text)

    def locate(
        self, messages: Sequence[Message], wanted: Sequence[int], tools: list[Any] | None = None
    ) -> tuple[str, list[Place]]:
        """The text of a conversation and the places of the answers that are ``wanted`` (by index).

        Raises:
            BadRow: a place is not certain, or the text there is not the answer.
        """
        self._refuse_control_tokens(messages)
        if self.marked:
            text, places = self._by_marks(messages, wanted, tools)
        else:
            text, places = self._by_turns(messages, wanted, tools)
        for place in places:
            _check_answer(text, place, messages[place.index])
        return text, places

    def place_of_content(
        self, text: str, messages: Sequence[Message], index: int, tools: list[Any] | None = None
    ) -> tuple[int, int]:
        """Where the content of one message stands in ``text``, found by putting another text in its place.

        Raises:
            BadRow: the template does not write the content as it is.
        """
        before, after = self._around(messages, index, tools)
        start, end = len(before), len(text) - len(after)
        content = messages[index].content.strip()
        if not (text.startswith(before) and text.endswith(after) and text[start:end].strip() == content):
            raise BadRow("template", f"the chat template does not write message {index + 1} as it is")
        return start, end

    def _around(self, messages: Sequence[Message], index: int, tools: list[Any] | None) -> tuple[str, str]:
        """What is rendered before and after the content of message ``index``."""
        stand_in = _STAND_IN
        while any(stand_in in f"{message.content} {message.reasoning}" for message in messages):
            stand_in += "q"
        others = list(messages)
        others[index] = replace(others[index], content=stand_in)
        before, *after = self.render(others, tools=tools).split(stand_in)
        if len(after) != 1:
            raise BadRow(
                "template", f"the chat template writes message {index + 1} {len(after)} times, not once"
            )
        return before, after[0]

    def _by_marks(
        self, messages: Sequence[Message], wanted: Sequence[int], tools: list[Any] | None
    ) -> tuple[str, list[Place]]:
        text, spans = self._render_marked(messages, tools)
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if len(spans) != len(answers):
            raise BadRow(
                "template",
                f"the template's {{% generation %}} marks {len(spans)} parts, and there are "
                f"{len(answers)} answers",
            )
        places = []
        for index, (start, end) in zip(answers, spans, strict=True):
            if index in wanted:
                if self._header_is_marked:
                    # The header is given when the model is used, whatever the marks hold.
                    start = max(
                        start,
                        _start(text, self.render(messages[:index], tools=tools, ask=True), messages, index),
                    )
                places.append(Place(index, start, self._end_of_marked(text, start, end)))
        return text, places

    def _render_marked(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils import chat_template_utils

        # Its annotations say less than it returns.
        render: Any = chat_template_utils.render_jinja_template
        try:
            texts, spans = render(
                [[message.as_dict() for message in messages]],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # noqa: BLE001 - a template may raise whatever its expressions can
            raise BadRow("template", f"the chat template does not take it: {error}") from None
        return texts[0], spans[0]

    def _end_of_marked(self, text: str, start: int, end: int) -> int:
        """The end of the end-of-turn token of a marked part, or of the one that follows it at once."""
        within = text[start:end].rstrip()
        last = text.rfind(self.end_of_turn, start, end)
        if last >= 0 and not text[last + len(self.end_of_turn) : end].strip():
            return last + len(self.end_of_turn)
        following = text[end:].lstrip()
        if following.startswith(self.end_of_turn):
            return len(text) - len(following) + len(self.end_of_turn)
        if within.endswith(tuple(self._added)):
            return start + len(within)
        raise BadRow("template", "a part marked {% generation %} is followed by no end-of-turn token")

    def _by_turns(
        self, messages: Sequence[Message], wanted: Sequence[int], tools: list[Any] | None
    ) -> tuple[str, list[Place]]:
        text = self.render(messages, tools=tools)
        places = []
        for index in wanted:
            start = _start(text, self.render(messages[:index], tools=tools, ask=True), messages, index)
            limit = len(text)
            if index + 1 < len(messages):
                before, _ = self._around(messages, index + 1, tools)
                limit = len(before)
                if not text.startswith(before):
                    raise BadRow(
                        "template",
                        f"what the chat template writes up to message {index + 2} depends on that message, "
                        f"so the end of answer {index + 1} is not certain",
                    )
            found = text.find(self.end_of_turn, start, limit)
            if found < 0:
                raise BadRow(
                    "template", f"the chat template ends message {index + 1} without {self.end_of_turn!r}"
                )
            places.append(Place(index, start, found + len(self.end_of_turn)))
        return text, places

    def _refuse_control_tokens(self, messages: Sequence[Message]) -> None:
        """Text that holds a control token would be read as the end of a turn, or as the start of another."""
        for number, message in enumerate(messages, start=1):
            calls = str(message.tool_calls) if message.tool_calls else ""
            held = f"{message.content}\n{message.reasoning or ''}\n{calls}"
            for token in self._control:
                if token in held:
                    raise BadRow(
                        "control_token",
                        f"message {number} ({message.role}) holds the control token {token!r}",
                    )

    def _find_end_of_turn(self, probe: Sequence[Message]) -> tuple[str, ...]:
        """The tokens that end every answer: those that follow at once on the first one after its text."""
        text = self.render(probe)
        ends = []
        for index, message in enumerate(probe):
            if message.role == "assistant":
                start = text.find(message.content)
                limit = text.find(probe[index + 1].content) if index + 1 < len(probe) else len(text)
                if start < 0 or limit < 0:
                    raise BadRow("template", "it does not write every message of a plain conversation")
                ends.append(self._first_added(text[start + len(message.content) : limit]))
        if not ends[-1]:
            raise BadRow(
                "template", "no token of the tokenizer's own ends an answer, so none could be trained"
            )
        common = [tokens[0] for tokens in zip(*ends, strict=False) if len(set(tokens)) == 1]
        if ends[0][:1] != ends[-1][:1]:
            raise BadRow(
                "template",
                f"it ends the last answer with {ends[-1][0]!r} and earlier ones with "
                f"{''.join(ends[0][:1]) or 'no token'!r}; set data.last_turn_only to train on last answers "
                "alone",
            )
        return tuple(common)

    def _first_added(self, text: str) -> list[str]:
        """The first of the tokenizer's own tokens in ``text``, and those that follow it without a gap."""
        found = [(text.find(token), -len(token)) for token in self._added if token in text]
        text = text[min(found)[0] :] if found else ""
        run = []
        while token := next((token for token in self._added if text.startswith(token)), ""):
            run.append(token)
            text = text[len(token) :]
        return run

    def _check(self, probe: Sequence[Message]) -> None:
        """Find the answers of a plain conversation, and see that they are the answers and nothing else."""
        wanted = [index for index, message in enumerate(probe) if message.role == "assistant"]
        text, places = self.locate(probe, wanted)
        for place in places:
            header = without_opening(self.render(probe[: place.index], ask=True))
            self._header_is_marked |= text.startswith(header) and place.start < len(header)
        text, places = self.locate(probe, wanted)
        for place in places:
            found = text[place.start : place.end]
            if any(message.content in found for message in probe if message.role != "assistant"):
                raise BadRow("template", "its {% generation %} holds the user's message as well")


def _start(text: str, prompt: str, messages: Sequence[Message], index: int) -> int:
    """Where the answer begins: after the prompt, or after all of it but the mark that asks for reasoning."""
    for begins in (prompt, without_opening(prompt)):
        if text.startswith(begins):
            return len(begins)
    last = index + 1 == len(messages)
    raise BadRow(
        "template",
        f"what comes before message {index + 1} is rendered differently alone than within the whole, so "
        f"where that answer starts is not certain; {'' if last else 'data.last_turn_only may help, or '}"
        "{% generation %} marks in the template would say",
    )


def _check_answer(text: str, place: Place, message: Message) -> None:
    """See that the text at the place is the answer."""
    found = text[place.start : place.end]
    content = message.content
    block = find_reasoning(content, 0, len(content))
    if block is not None:
        content = content[block.end :]
    if content.strip() not in found:
        raise BadRow("template", f"the chat template does not write message {place.index + 1} as it is")
    if any(call["function"]["name"] not in found for call in message.tool_calls):
        raise BadRow("template", f"the chat template leaves out the tool calls of message {place.index + 1}")


def _source(tokenizer: PreTrainedTokenizerBase) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ConfigError(
            "the tokenizer has no chat template: take the model's instruct version, or put a "
            "chat_template.jinja into the model's folder; for plain text set the source's mode to pretrain"
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not say where in the text its tokens are; a fast tokenizer is "
            "needed"
        )
    return str(template)


def _has_marks(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
