"""Tokenizers trained on the spot, with the chat templates that well-known model families use.

Each family's template is written out here from its public form, and its control tokens are added tokens of
the tokenizer, as they are in the real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is two plus two? It is four, of course!",
    "Please name the capital of France. The capital of France is Paris.\n\nAnything else?",
    '{"name": "weather", "arguments": {"city": "Paris"}} user assistant system tool model',
    "def add(a, b):\n    return a + b\n\nprint(add(2, 2))  # naïve café 東京 🙂",
    "Let me think about this step by step. First, the answer is here. So the answer is 42.",
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] "
    "| trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
#: Reasoning is written for the answers after the last question alone, tools' answers as a user's message.
QWEN3 = (
    "{%- set ns = namespace(searching=true, last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.searching and message.role == 'user' %}{%- set ns.searching = false %}"
    "{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role in ['user', 'system'] %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set reasoning = '' %}"
    "{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- content.lstrip('\n') }}"
    "{%- for call in message.tool_calls or [] %}{%- if content or not loop.first %}{{- '\n' }}{%- endif %}"
    "{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
#: The prompt opens the reasoning itself, and earlier answers are written without any.
OPENED_THINKING = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|User|>' + message['content'] }}{% else %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A model family: its template, its control tokens, and what ends an answer."""

    template: str
    tokens: tuple[str, ...]
    end: str
    bos: str | None = None
    eos: str | None = None
    system: bool = True

    def tokenizer(self) -> Any:
        return make_tokenizer(self.template, self.tokens, bos=self.bos, eos=self.eos or self.end)


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_QWEN = (*_IM, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "chatml": Family(CHATML, _IM, "<|im_end|>"),
    "chatml with marks": Family(CHATML_MARKED, _IM, "<|im_end|>"),
    "llama 3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(MISTRAL, ("<s>", "</s>"), "</s>", bos="<s>", system=False),
    "gemma": Family(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        bos="<bos>",
        eos="<eos>",
        system=False,
    ),
    "zephyr": Family(ZEPHYR, ("<s>", "</s>"), "</s>", bos="<s>"),
    "phi 3": Family(
        PHI3,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        "<|end|>",
        eos="<|endoftext|>",
    ),
    "qwen 3": Family(QWEN3, _QWEN, "<|im_end|>"),
    "opened thinking": Family(
        OPENED_THINKING,
        ("<bos>", "<eos>", "<|User|>", "<|Assistant|>", "<think>"),
        "<eos>",
        bos="<bos>",
        system=False,
    ),
}


@cache
def make_tokenizer(
    template: str | None,
    tokens: tuple[str, ...] = (),
    *,
    bos: str | None = None,
    eos: str | None = None,
    metaspace: bool = False,
    adds_bos: bool = False,
) -> Any:
    """A BPE tokenizer of some 400 entries: byte-level, or over words marked by a leading ▁."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None, byte_fallback=metaspace))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
        alphabet = []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)] if metaspace else []
    special = [*(["<unk>"] if metaspace else []), *tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=420 + len(bytes_of),
        initial_alphabet=alphabet,
        special_tokens=[*special, *bytes_of],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=eos)
    made.chat_template = template
    return made


def trained_text(tokenizer: Any, encoded: Any) -> list[str]:
    """The text of each unbroken run of tokens that bear loss."""
    runs: list[list[int]] = []
    before = False
    for token, label in zip(encoded.input_ids, encoded.labels, strict=True):
        assert label in (-100, token)
        if label != -100:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = label != -100
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]
