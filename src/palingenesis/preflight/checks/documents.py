"""Masks of collated documents, held against the messages they were made of.

The main check is the round trip: the tokens that bear loss, decoded, must be the assistant's messages with
the tokens that end a turn, and nothing else. It knows nothing of how masks are made, so it sees any mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palingenesis.preflight.samples import Batch, Document, Reader, wanted_messages
from palingenesis.preflight.tally import Tally
from palingenesis.preflight.words import counted
from palingenesis.sft.data import IGNORED, BadRow, Message
from palingenesis.sft.data.reasoning import MARKS, find_reasoning

#: What a decoder gives for bytes that are no whole character: where a sample was cut.
_UNFINISHED = "\ufffd"
_SHOWN = 60


@dataclass
class DocumentChecks:
    """Checks the documents of batches and counts what is wrong with them in ``tally``."""

    reader: Reader
    tally: Tally
    bos: int | None = field(init=False)
    pad: int | None = field(init=False)
    adds_bos: bool = field(init=False)

    def __post_init__(self) -> None:
        tokenizer: Any = self.reader.tokenizer
        self.bos, self.pad = tokenizer.bos_token_id, tokenizer.pad_token_id
        self.adds_bos = self.bos is not None and tokenizer("a")["input_ids"][:1] == [self.bos]
        self._added = sorted(filter(None, tokenizer.get_added_vocab()), key=len, reverse=True)

    def check(self, batch: Batch) -> None:
        """Check every document of a batch, and its padding."""
        self.tally.cells += int(batch.tensors["input_ids"].numel())
        self._check_padding(batch)
        for document in batch.documents:
            self._check_document(document)
            if batch.packed and not np.array_equal(document.positions, np.arange(len(document.ids))):
                told = f"its positions begin with {document.positions[:3].tolist()}, not with [0, 1, 2]"
                self._note("data.packing_leak", document, told)

    def _note(self, check: str, document: Document, example: str = "") -> None:
        self.tally.note(check, document.sample.source, document.sample.line, example)

    def _check_padding(self, batch: Batch) -> None:
        mask, labels = batch.tensors.get("attention_mask"), batch.tensors["labels"]
        if mask is None or mask.shape != labels.shape:
            return
        if bool(mask.all()):
            return
        trained = ((mask == 0) & (labels != IGNORED)).any(-1).tolist()
        for wrong, row in zip(trained, batch.rows, strict=False):
            if wrong:
                self._note("masking.pad_trained", row[0])

    def _check_document(self, document: Document) -> None:
        ids, labels = document.ids, document.labels
        self.tally.largest_id = max(self.tally.largest_id, int(ids.max(initial=-1)))
        trained = labels != IGNORED
        if not trained.any():
            self.tally.lost["collator"] += 1
            self._note("masking.no_loss_tokens", document, "the collator masks every token of it")
            return
        if (labels[trained] != ids[trained]).any():
            self._note("masking.labels_shifted", document)
            return
        if not document.sample.messages:
            return
        self._check_beginning(document)
        if not self._check_masked(document, trained):
            self._check_round_trip(document, trained)

    def _check_masked(self, document: Document, trained: Any) -> bool:
        """Whether all is trained, tokens that pad aside: a collator may take them for padding anywhere.

        The first token is masked by some and trained by others: nothing predicts it.
        """
        ids = document.ids[1:]
        masked = ids[~trained[1:]]
        if not len(ids) or (masked != self.pad).any():
            return False
        self._note("masking.all_loss", document)
        if len(masked) and self._ends_answers(self.pad):
            told = f"every {self._decode([self.pad])!r} is masked"
            self._note("masking.end_of_turn_untrained", document, told)
        return True

    def _ends_answers(self, token: Any) -> bool:
        """Whether a token is, or is part of, what ends an answer."""
        return self._decode([token]) in self.reader.require_masker().end_of_turn

    def _check_beginning(self, document: Document) -> None:
        first = document.ids[:2].tolist()
        if self.bos is not None and first == [self.bos, self.bos]:
            self._note("tokenizer.double_bos", document)
        elif self.adds_bos and first[:1] != [self.bos]:
            self._note("tokenizer.missing_bos", document)

    # -- the round trip ------------------------------------------------------------------------------------

    def _check_round_trip(self, document: Document, trained: Any) -> None:
        sample, tally = document.sample, self.tally
        edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        runs = [self._decode(document.ids[start:end]) for start, end in edges]
        for number, (start, end) in enumerate(edges):
            tally.count_turn(number, int(end - start))
        wanted = wanted_messages(sample.messages, self.reader.options)
        cut = sample.encoded.truncated
        if len(runs) > len(wanted) or (len(runs) < len(wanted) and not cut):
            told = f"loss is on {counted(len(runs), 'run')} of tokens, for {counted(len(wanted), 'message')}"
            self._note("masking.round_trip", document, f"{told}: {_shown(' … '.join(runs))}")
            return
        for number, (run, index) in enumerate(zip(runs, wanted, strict=False)):
            last = cut and number == len(runs) - 1
            if problem := self._compare(run, index, document, may_be_cut=last):
                self._note(*problem)
                return

    def _compare(
        self, run: str, index: int, document: Document, *, may_be_cut: bool
    ) -> tuple[str, Document, str] | None:
        """What is wrong with the text that is trained for a message."""
        message = document.sample.messages[index]
        text = run.strip()
        end = self.reader.require_masker().end_of_turn if message.role == "assistant" else ""
        ended = text.endswith(end)
        body = text.removesuffix(end).strip()
        if may_be_cut and not ended:
            return self._compare_cut(body, document)
        if message.role == "tool" and body == _within_tokens(document, index):
            return None
        before = self._before(body, message)
        if before and self._is_header(before, index, document):
            return "masking.header_trained", document, f"trained is {_shown(run)}"
        if before is None or not self._only_added(before):
            expected = _shown(_answer(message)[1] + end)
            told = f"trained is {_shown(run)}, and message {index + 1} is {expected}"
            return "masking.round_trip", document, told
        if not ended:
            return "masking.end_of_turn_untrained", document, f"trained is {_shown(run)}, without {end!r}"
        return None

    def _compare_cut(self, body: str, document: Document) -> tuple[str, Document, str] | None:
        """A message that was cut: what is left of it must be in the text."""
        origin = document.sample.encoded.origin
        left = body.rstrip(_UNFINISHED).strip()
        if origin is None or left in origin.text or self._spelled(left) in self._spelled(origin.text):
            return None
        return "masking.round_trip", document, f"trained is {_shown(body)}, which is nowhere in the text"

    def _before(self, body: str, message: Message) -> str | None:
        """What is trained before the message itself; ``None`` if the message is not what follows."""
        reasoning, content = _answer(message)
        if body == content:
            return ""
        if message.tool_calls:
            names = [call["function"]["name"] for call in message.tool_calls]
            return "" if content in body and all(name in body for name in names) else None
        if not body.endswith(content):
            content = self._spelled(content)
            if not body.endswith(content):
                return None
        before = body[: len(body) - len(content)].strip()
        if reasoning and self.reader.options.train_on_reasoning and reasoning in before:
            before = _without_marks(before.replace(reasoning, "", 1))
        return before

    def _only_added(self, text: str) -> bool:
        """Whether a text is nothing but the tokenizer's own tokens: a template may begin answers so."""
        for token in self._added:
            text = text.replace(token, "")
        return not text.strip()

    def _is_header(self, before: str, index: int, document: Document) -> bool:
        """Whether a text is part of what the model is given before the answer."""
        sample = document.sample
        try:
            prompt = self.reader.require_masker().prompt(sample.messages[:index], tools=sample.tools)
        except BadRow:
            return False
        return prompt.rstrip().endswith(before)

    def _decode(self, ids: Any) -> str:
        return str(
            self.reader.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _spelled(self, text: str) -> str:
        """A text as it comes out of the tokenizer, which may write it in a normal form of its own."""
        tokenizer: Any = self.reader.tokenizer
        return self._decode(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]).strip()


def _within_tokens(document: Document, index: int) -> str:
    """What a tool returned, without the characters at its ends that share a token with the template's."""
    origin = document.sample.encoded.origin
    if origin is None:
        return ""
    span = next((span for span in origin.spans if span.index == index), None)
    if span is None:
        return ""
    inside = [(start, end) for start, end in origin.offsets if start >= span.start and end <= span.end]
    return origin.text[inside[0][0] : inside[-1][1]].strip() if inside else ""


def _answer(message: Message) -> tuple[str, str]:
    """The reasoning of a message, and the rest of it."""
    content = message.content
    block = find_reasoning(content, 0, len(content)) if message.role == "assistant" else None
    if block is None:
        return (message.reasoning or "").strip(), content.strip()
    held = content[block.start : block.end]
    return (message.reasoning or _without_marks(held)).strip(), content[block.end :].strip()


def _without_marks(text: str) -> str:
    for mark in (mark for pair in MARKS for mark in pair):
        text = text.replace(mark, "")
    return text.strip()


def _shown(text: str) -> str:
    told = repr(text)
    return told if len(told) <= _SHOWN else told[: _SHOWN - 2] + "…'"
