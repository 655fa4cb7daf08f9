"""Messages to token ids and labels: the one place that decides which tokens a model is trained on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from palingenesis.sft.data.messages import Message
from palingenesis.sft.data.reasoning import find_reasoning
from palingenesis.sft.data.rows import BadRow
from palingenesis.sft.data.template import ChatTemplate, Place, RefusedTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The label of a token that bears no loss, as torch's cross-entropy has it.
IGNORED = -100


@dataclass(frozen=True)
class MaskOptions:
    """What is trained, besides the answers and their end-of-turn tokens.

    Attributes:
        max_length: tokens a sample may have; what is longer is cut, and counted.
        last_turn_only: train only the answers after the last message of the user.
        train_on_reasoning: train the reasoning before an answer too; where it is empty it never is.
        include_observations: train what tools returned too.
    """

    max_length: int | None = None
    last_turn_only: bool = False
    train_on_reasoning: bool = True
    include_observations: bool = False


@dataclass(frozen=True)
class Span:
    """Characters to train on, of message ``index``.

    ``after_prompt``: what is before is what the model is given when it is used.
    """

    start: int
    end: int
    kind: Literal["answer", "observation"] = "answer"
    after_prompt: bool = True
    index: int = -1


@dataclass(frozen=True)
class Origin:
    """How a conversation's tokens came about.

    Attributes:
        text: the conversation as the chat template writes it.
        offsets: where each token begins and ends in it, those that were cut off included.
        spans: what of it is trained.
        cuts: ends of prompts that the tokenizer would have put inside a token.
        messages: what the template was given, with the descriptions of ``tools``.
    """

    text: str
    offsets: Sequence[tuple[int, int]]
    spans: Sequence[Span]
    cuts: Sequence[int] = ()
    messages: Sequence[Message] = ()
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Encoded:
    """One sample. ``labels`` are the ids where a token bears loss and ``IGNORED`` elsewhere.

    ``truncated``: it was cut at ``max_length``. ``reasoning_dropped``: the row has reasoning that the chat
    template leaves out. ``origin``: for conversations, how its tokens came about.
    """

    input_ids: list[int]
    labels: list[int]
    truncated: bool = False
    reasoning_dropped: bool = False
    origin: Origin | None = field(default=None, compare=False, repr=False)

    @property
    def loss_tokens(self) -> int:
        """How many tokens bear loss."""
        return len(self.labels) - self.labels.count(IGNORED)


class Masker:
    """Encodes conversations and plain text with one tokenizer.

    Raises:
        RefusedTemplate: the tokenizer's chat template leaves it uncertain which tokens are answers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: MaskOptions | None = None) -> None:
        self.options = options or MaskOptions()
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, only_last=self.options.last_turn_only)
        self._reject_two_beginnings()

    @property
    def end_of_turn(self) -> str:
        """The token that ends an answer."""
        return self._template.end_of_turn

    @property
    def method(self) -> Literal["generation marks", "turn by turn"]:
        """How answers are found with this tokenizer."""
        return "generation marks" if self._template.marked else "turn by turn"

    def encode(self, messages: Sequence[Message], *, tools: list[Any] | None = None) -> Encoded:
        """One conversation as token ids and labels.

        Raises:
            BadRow: the template does not take these messages, or an answer's place is not certain.
        """
        text, spans = self.spans(messages, tools=tools)
        ids, offsets, cuts = self._tokens(text, [span.start for span in spans if span.after_prompt])
        labels = [IGNORED] * len(ids)
        for span in spans:
            chosen = _tokens_of(span, offsets)
            if span.kind == "answer":
                self._check_spelling(text[span.start : span.end], [ids[position] for position in chosen])
            for position in chosen:
                labels[position] = ids[position]
        labels[:1] = [IGNORED]  # nothing predicts the first token
        dropped = any(message.reasoning and message.reasoning.strip() not in text for message in messages)
        most = self.options.max_length
        return Encoded(
            ids[:most],
            labels[:most],
            most is not None and len(ids) > most,
            dropped,
            Origin(text, offsets, spans, cuts, messages, tools),
        )

    def place_of_content(
        self, text: str, messages: Sequence[Message], index: int, *, tools: list[Any] | None = None
    ) -> tuple[int, int] | None:
        """Where the content of one message stands in the conversation's ``text``, if that is certain."""
        try:
            return self._template.place_of_content(text, messages, index, tools)
        except BadRow:
            return None

    def prompt(self, messages: Sequence[Message], *, tools: list[Any] | None = None) -> str:
        """What the model is given, when it is used, to answer ``messages``.

        Raises:
            BadRow: the template does not take these messages.
        """
        return self._template.render(messages, tools=tools, ask=True)

    def spans(self, messages: Sequence[Message], *, tools: list[Any] | None = None) -> tuple[str, list[Span]]:
        """The text of a conversation, and which of its characters are trained."""
        wanted = self._wanted(messages)
        answers = [index for index in wanted if messages[index].role == "assistant"]
        text, places = self._template.locate(messages, answers, tools)
        spans = [self._span_of_answer(text, place) for place in places]
        for index in wanted:
            if messages[index].role == "tool" and messages[index].content.strip():
                start, end = self._template.place_of_content(text, messages, index, tools)
                spans.append(Span(start, end, "observation", after_prompt=False, index=index))
        return text, sorted(spans, key=lambda span: span.start)

    def _wanted(self, messages: Sequence[Message]) -> list[int]:
        """The messages that are trained."""
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        first = users[-1] if users and self.options.last_turn_only else 0
        roles = ("assistant", "tool") if self.options.include_observations else ("assistant",)
        return [
            index
            for index, message in enumerate(messages)
            if index >= first and message.role in roles and message.trained
        ]

    def _span_of_answer(self, text: str, place: Place) -> Span:
        reasoning = find_reasoning(text, place.start, place.end)
        if reasoning is None or (self.options.train_on_reasoning and not reasoning.empty):
            return Span(place.start, place.end, index=place.index)
        # Empty reasoning is the template's, as part of the prompt; other reasoning is the model's own.
        return Span(reasoning.end, place.end, after_prompt=reasoning.empty, index=place.index)

    def _tokens(
        self, text: str, prompt_ends: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """The ids of a rendered text, where each begins and ends in it, and where the text was cut.

        A token that spans the end of a prompt could never be predicted, since the prompt is given as a whole:
        there the text is cut and its parts are tokenised alone, as they are when the model is used.
        """
        ids, offsets = self._tokenize(text)
        before = {end: bisect_left(offsets, (end, 0)) - 1 for end in prompt_ends}
        crossed = {end for end, token in before.items() if token >= 0 and offsets[token][1] > end}
        if not crossed:
            return ids, offsets, []
        whole = self._decode(ids)
        ids, offsets = [], []
        edges = [0, *sorted(crossed), len(text)]
        for begin, end in pairwise(edges):
            part_ids, part_offsets = self._tokenize(text[begin:end])
            ids += part_ids
            offsets += [(start + begin, stop + begin) for start, stop in part_offsets]
        if self._decode(ids) != whole:
            raise BadRow(
                "template",
                "the tokenizer joins the end of the prompt and the answer's beginning in one token",
            )
        return ids, offsets, sorted(crossed)

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        # The template has written the tokens of the beginning itself: nothing is to be added.
        found: Any = self._tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return list(found["input_ids"]), list(found["offset_mapping"])

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _check_spelling(self, expected: str, ids: list[int]) -> None:
        """See that the tokens to be trained spell the answer, no more and no less."""
        found = self._decode(ids).strip()
        if found == expected.strip():
            return
        # A tokenizer may write text in a normal form of its own; then it does so with the expected text too.
        if found != self._decode(self._tokenize(expected)[0]).strip():
            raise BadRow("template", "the tokens at the place of the answer do not spell the answer")

    def _reject_two_beginnings(self) -> None:
        beginning = self._tokenizer.bos_token_id
        probe = [Message("user", "question"), Message("assistant", "answer")]
        if beginning is not None and self.encode(probe).input_ids[:2] == [beginning, beginning]:
            raise RefusedTemplate(
                f"the chat template begins a conversation with two {self._tokenizer.bos_token!r}: take one "
                "out of the template",
                two_beginnings=True,
            )


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int | None) -> list[Encoded]:
    """Plain text, every token of it trained, in as many samples as ``max_length`` makes necessary.

    The text begins as the tokenizer begins a text (once, also where it already says so) and ends with the
    end-of-text token.
    """
    begins = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    ids = list(tokenizer(text, add_special_tokens=not begins, verbose=False)["input_ids"])
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    step = max_length or len(ids)
    parts = [ids[start : start + step] for start in range(0, len(ids), step)] if ids else []
    # One token alone has nothing to predict it from.
    return [Encoded(part, [IGNORED, *part[1:]]) for part in parts if len(part) > 1]


def _tokens_of(span: Span, offsets: Sequence[tuple[int, int]]) -> range:
    """Which tokens belong to a span: an observation's lie within it, an answer's may reach over its edges."""
    first = bisect_left(offsets, (span.start, 0))
    last = bisect_left(offsets, (span.end, 0))
    if span.kind == "observation":
        while last > first and offsets[last - 1][1] > span.end:
            last -= 1
    elif first and offsets[first - 1][1] > span.start:
        first -= 1
    return range(first, last)
