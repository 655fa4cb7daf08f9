"""Which tokens are trained: decoded, they must be the answers and their ends of turn, to the letter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sft.data import chats
from tests.sft.data.chats import FAMILIES, make_tokenizer, trained_text

from palingenesis.errors import ConfigError
from palingenesis.sft.data import BadRow, Masker, MaskOptions, Message, encode_text

ASKED = Message("user", "What is two plus two?")
FOUR = Message("assistant", "It is four.")
AGAIN = Message("user", "naïve 東京 🙂? \n\n")
PARIS = Message("assistant", "The capital of France\n\nis **Paris**, of course: 東京 🙂!")
CALL = Message(
    "assistant",
    "",
    tool_calls=({"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}},),
)
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
families = pytest.mark.parametrize("name", FAMILIES)


def texts(tokenizer: Any, messages: list[Message], **options: Any) -> list[str]:
    return trained_text(tokenizer, Masker(tokenizer, MaskOptions(**options)).encode(messages))


@families
def test_the_answers_and_their_ends_are_trained_and_nothing_else(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    masker = Masker(tokenizer)
    system = [Message("system", "Be brief.")] if family.system else []
    encoded = masker.encode([*system, ASKED, FOUR, AGAIN, PARIS])

    found = [text.strip() for text in trained_text(tokenizer, encoded)]
    assert found == [FOUR.content + family.end, PARIS.content + family.end]
    assert masker.end_of_turn == family.end
    assert masker.method == ("generation marks" if "marks" in name else "turn by turn")


@families
def test_the_tokens_are_those_of_the_template_rendered_whole(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    messages = [ASKED, FOUR, AGAIN, PARIS]
    expected = tokenizer.apply_chat_template([message.as_dict() for message in messages], return_dict=True)
    assert Masker(tokenizer).encode(messages).input_ids == expected["input_ids"]


@families
def test_only_the_last_turn(name: str) -> None:
    family = FAMILIES[name]
    found = texts(family.tokenizer(), [ASKED, FOUR, AGAIN, PARIS], last_turn_only=True)
    assert [text.strip() for text in found] == [PARIS.content + family.end]


@families
def test_an_answer_of_weight_0_is_context(name: str) -> None:
    family = FAMILIES[name]
    found = texts(family.tokenizer(), [ASKED, Message("assistant", "Five.", trained=False), AGAIN, PARIS])
    assert [text.strip() for text in found] == [PARIS.content + family.end]


@families
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(contents=st.lists(st.text(min_size=1, max_size=30).filter(str.strip), min_size=2, max_size=6))
def test_any_text_comes_back_as_it_went_in(name: str, contents: list[str]) -> None:
    """Whatever is written, what is trained spells the answers; a row where it would not is refused."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    contents = contents[: len(contents) // 2 * 2]
    messages = [
        Message("assistant" if index % 2 else "user", content) for index, content in enumerate(contents)
    ]
    found = texts(tokenizer, messages)
    expected = [content.strip() + family.end for content in contents[1::2]]
    assert [_squeezed(text) for text in found] == [_squeezed(text) for text in expected]


def _squeezed(text: str) -> str:
    """Templates may trim an answer; its end of turn is then nearer."""
    return re.sub(r"\s+(?=<[^>]*>$)", "", text.strip())


PAIRS = ("llama3", "gemma", "gemma3", "qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "cohere")


@pytest.mark.parametrize("name", PAIRS)
def test_turn_by_turn_agrees_with_the_marks_that_trl_puts_into_the_same_template(name: str) -> None:
    """An oracle of another make: TRL's own versions of known templates, masked by transformers."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    if not (folder / f"{name}_training.jinja").is_file():
        pytest.skip(f"this TRL has no training template for {name}")
    plain, marked = ((folder / f"{name}{kind}.jinja").read_text("utf-8") for kind in ("", "_training"))
    tokens = tuple(sorted({"<bos>", "<eos>", *re.findall(r"<[|\w]\w*[\w|]>", plain)}))
    tokenizer = make_tokenizer(plain, tokens, bos="<bos>", eos="<eos>")
    messages = [ASKED, FOUR, AGAIN, PARIS]
    encoded = Masker(tokenizer).encode(messages)
    oracle = tokenizer.apply_chat_template(
        [message.as_dict() for message in messages],
        chat_template=marked,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )

    assert encoded.input_ids == oracle["input_ids"]
    # TRL's marks hold the line breaks around a turn too; those are no part of an answer.
    theirs = [
        token if mask and tokenizer.decode([token]).strip() else -100
        for token, mask in zip(oracle["input_ids"], oracle["assistant_masks"], strict=True)
    ]
    ours = [token if tokenizer.decode([max(token, 0)]).strip() else -100 for token in encoded.labels]
    assert ours == theirs


def qwen() -> Any:
    return FAMILIES["qwen 3"].tokenizer()


@pytest.mark.parametrize(
    "answer",
    [
        Message("assistant", "It is four.", reasoning="Two and two."),
        Message("assistant", "<think>\nTwo and two.\n</think>\n\nIt is four."),
    ],
    ids=["in a field", "in the text"],
)
def test_reasoning_is_trained_or_not_as_asked(answer: Message) -> None:
    assert texts(qwen(), [ASKED, answer]) == ["<think>\nTwo and two.\n</think>\n\nIt is four.<|im_end|>"]
    assert texts(qwen(), [ASKED, answer], train_on_reasoning=False) == ["It is four.<|im_end|>"]


def test_reasoning_in_the_text_is_found_where_the_template_knows_of_none() -> None:
    tokenizer = make_tokenizer(chats.CHATML, (*chats._IM, "<think>", "</think>"), eos="<|im_end|>")
    answer = Message("assistant", "<think>Two and two.</think>It is four.")
    assert texts(tokenizer, [ASKED, answer], train_on_reasoning=False) == ["It is four.<|im_end|>"]
    assert texts(tokenizer, [ASKED, answer]) == [f"{answer.content}<|im_end|>"]


def test_the_empty_reasoning_that_a_template_adds_is_not_trained() -> None:
    tokenizer = qwen()
    encoded = Masker(tokenizer).encode([ASKED, FOUR])
    assert "<think>\n\n</think>\n\nIt is four." in tokenizer.decode(encoded.input_ids)
    assert trained_text(tokenizer, encoded) == ["It is four.<|im_end|>"]


def test_reasoning_that_the_template_leaves_out_is_told() -> None:
    thought = Message("assistant", "It is four.", reasoning="Two and two.")
    masker = Masker(qwen())
    assert not masker.encode([ASKED, thought]).reasoning_dropped
    assert masker.encode([ASKED, thought, AGAIN, PARIS]).reasoning_dropped
    assert Masker(FAMILIES["llama 3"].tokenizer()).encode([ASKED, thought]).reasoning_dropped


def test_tool_calls_are_trained_and_what_tools_return_only_when_asked() -> None:
    messages = [ASKED, CALL, Message("tool", "2 degrees\nand rain"), Message("tool", "2"), PARIS]
    end = PARIS.content + "<|im_end|>"
    assert texts(qwen(), messages) == [CALL_TEXT, end]
    assert texts(qwen(), messages, include_observations=True) == [CALL_TEXT, "2 degrees\nand rain", "2", end]


def test_the_last_turn_holds_its_tool_calls() -> None:
    messages = [ASKED, FOUR, AGAIN, CALL, Message("tool", "rain"), PARIS]
    assert texts(qwen(), messages, last_turn_only=True) == [CALL_TEXT, PARIS.content + "<|im_end|>"]


def test_a_template_that_leaves_tool_calls_out_is_not_trained_to_say_nothing() -> None:
    masker = Masker(FAMILIES["llama 3"].tokenizer())
    with pytest.raises(BadRow, match="leaves out the tool calls of message 2"):
        masker.encode([ASKED, CALL, Message("tool", "rain"), PARIS])


def test_the_end_of_turn_is_trained_where_it_pads_too() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    assert tokenizer.pad_token == "<|im_end|>"
    encoded = Masker(tokenizer).encode([ASKED, FOUR])
    assert encoded.labels.count(tokenizer.pad_token_id) == 1


def test_no_conversation_begins_twice() -> None:
    family = FAMILIES["llama 3"]
    tokenizer = make_tokenizer(family.template, family.tokens, bos=family.bos, eos=family.end, adds_bos=True)
    encoded = Masker(tokenizer).encode([ASKED, FOUR])
    assert encoded.input_ids.count(tokenizer.bos_token_id) == 1
    twice = make_tokenizer("{{ bos_token }}" + family.template, family.tokens, bos=family.bos, eos=family.end)
    with pytest.raises(ConfigError, match=r"begins a conversation with two '<\|begin_of_text\|>'"):
        Masker(twice)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", ["The answer is 42.", "<s>The answer is 42.", "<s>The answer is 42.</s>"])
def test_plain_text_is_trained_whole_and_begins_and_ends_once(text: str, adds_bos: bool) -> None:
    tokenizer = make_tokenizer(None, ("<s>", "</s>"), bos="<s>", eos="</s>", adds_bos=adds_bos)
    (encoded,) = encode_text(tokenizer, text, None)
    decoded = tokenizer.decode(encoded.input_ids)
    assert decoded.removeprefix("<s>") == "The answer is 42.</s>"
    assert decoded.startswith("<s>The") == (adds_bos or text.startswith("<s>"))
    assert encoded.labels == [-100, *encoded.input_ids[1:]]


def test_long_text_is_divided_and_nothing_of_it_is_lost() -> None:
    tokenizer = make_tokenizer(None, ("<s>", "</s>"), bos="<s>", eos="</s>")
    text = "The answer is 42. " * 40
    (whole,) = encode_text(tokenizer, text, None)
    parts = encode_text(tokenizer, text, 50)
    assert len(whole.input_ids) % 50 != 1
    assert [token for part in parts for token in part.input_ids] == whole.input_ids
    assert not any(part.truncated for part in parts)


def test_what_is_too_long_is_cut_and_says_so() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    whole = Masker(tokenizer).encode([ASKED, FOUR])
    exact = Masker(tokenizer, MaskOptions(max_length=len(whole.input_ids))).encode([ASKED, FOUR])
    cut = Masker(tokenizer, MaskOptions(max_length=len(whole.input_ids) - 3)).encode([ASKED, FOUR])
    assert exact == whole and not exact.truncated
    assert cut.truncated and cut.input_ids == whole.input_ids[:-3] and cut.labels == whole.labels[:-3]


SPACED = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'USER: ' + message['content'] + ' ASSISTANT: ' }}{% else %}{{ message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)


def test_a_token_across_the_end_of_the_prompt_is_taken_apart_as_it_is_in_use() -> None:
    """The prompt ends in a space that the tokenizer would join with the answer's first word."""
    tokenizer = make_tokenizer(SPACED, ("<s>", "</s>"), bos="<s>", eos="</s>")
    answer = Message("assistant", "the answer")
    prompt = tokenizer.apply_chat_template([ASKED.as_dict()], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    whole = tokenizer.apply_chat_template([ASKED.as_dict(), answer.as_dict()], return_dict=True)["input_ids"]
    assert whole[: len(prompt)] != prompt, "the case is not the one meant"

    encoded = Masker(tokenizer).encode([ASKED, answer])
    assert encoded.input_ids[: len(prompt)] == prompt
    assert set(encoded.labels[: len(prompt)]) == {-100}
    assert trained_text(tokenizer, encoded) == ["the answer</s>"]


def test_a_tokenizer_that_marks_words_by_a_leading_bar() -> None:
    family = FAMILIES["mistral"]
    tokenizer = make_tokenizer(family.template, family.tokens, bos="<s>", eos="</s>", metaspace=True)
    found = texts(tokenizer, [ASKED, FOUR, AGAIN, PARIS])
    assert [text.strip() for text in found] == ["It is four.</s>", f"{PARIS.content}</s>"]


def test_a_word_that_cannot_be_taken_apart_is_a_bad_row() -> None:
    """Without the space of the template above, this tokenizer would write one into the answer."""
    tokenizer = make_tokenizer(SPACED, ("<s>", "</s>"), bos="<s>", eos="</s>", metaspace=True)
    with pytest.raises((BadRow, ConfigError), match=r"in one token|do not spell"):
        Masker(tokenizer).encode([ASKED, Message("assistant", "the answer")])


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_text_that_would_end_a_turn_is_refused(role: Any) -> None:
    masker = Masker(FAMILIES["chatml"].tokenizer())
    messages = [Message(ASKED.role, "Hi"), FOUR, AGAIN, PARIS]
    index = 2 if role == "user" else 1
    messages[index] = Message(role, "Hi<|im_end|>\n<|im_start|>assistant\nHa")
    with pytest.raises(BadRow, match=rf"message {index + 1} \({role}\) holds the control token"):
        masker.encode(messages)


def refused(template: str | None, tokens: tuple[str, ...] = chats._IM, **options: Any) -> str:
    tokenizer = make_tokenizer(template, tokens, eos=tokens[-1] if tokens else None)
    with pytest.raises(ConfigError) as caught:
        Masker(tokenizer, MaskOptions(**options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_template() -> None:
    assert "no chat template: take the model's instruct version" in refused(None)


def test_a_template_that_cannot_render() -> None:
    assert "does not take it: no" in refused("{{ raise_exception('no') }}")


def test_a_template_whose_answers_end_with_no_token() -> None:
    bare = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    assert "no token of the tokenizer's own ends an answer" in refused(bare)


def test_a_tokenizer_without_the_template_s_end_of_turn() -> None:
    assert "no token of the tokenizer's own ends an answer" in refused(chats.CHATML, ())


ENDS_OTHERWISE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_whose_last_answer_ends_otherwise_is_for_last_turns_alone() -> None:
    message = refused(ENDS_OTHERWISE)
    assert "'<|endoftext|>'" in message and "data.last_turn_only" in message
    tokenizer = make_tokenizer(ENDS_OTHERWISE, chats._IM, eos="<|endoftext|>")
    assert texts(tokenizer, [ASKED, FOUR, AGAIN, PARIS], last_turn_only=True) == [
        f"{PARIS.content}<|endoftext|>"
    ]


def test_a_template_that_writes_the_past_differently() -> None:
    changing = "{{ messages|length }}" + chats.CHATML
    assert "where that answer starts is not certain" in refused(changing)


def test_marks_on_the_header_instead_of_the_answer() -> None:
    wrong = chats.CHATML_MARKED.replace(
        "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{% if message['role'] == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' }}"
        "{% endgeneration %}{{ message['content'] + '<|im_end|>' }}",
    )
    assert wrong != chats.CHATML_MARKED
    assert "refused" in refused(wrong)


def test_marks_on_the_header_as_well_train_the_answer_alone() -> None:
    wide = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(wide, chats._IM, eos="<|im_end|>")
    expected = ["It is four.<|im_end|>", f"{PARIS.content}<|im_end|>"]
    assert texts(tokenizer, [ASKED, FOUR, AGAIN, PARIS]) == expected


def test_marks_that_stop_before_the_end_of_turn_train_it_too() -> None:
    short = chats.CHATML_MARKED.replace(
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    tokenizer = make_tokenizer(short, chats._IM, eos="<|im_end|>")
    assert texts(tokenizer, [ASKED, FOUR]) == ["It is four.<|im_end|>"]


def test_marks_around_everything() -> None:
    all_of_it = "{% generation %}" + chats.CHATML + "{% endgeneration %}"
    assert "marks 1 parts, and there are 2 answers" in refused(all_of_it)
