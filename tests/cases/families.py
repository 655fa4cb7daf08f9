"""Model families, each with its template in ``templates/`` and the tokens that its tokenizers have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sft.data.chats import make_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
SAMPLES = ("single", "multi", "system", "tool", "reasoning")

USER = {"role": "user", "content": "What is two plus two?"}
FOUR = {"role": "assistant", "content": "It is four."}
AGAIN = {"role": "user", "content": "And the weather\n\nin Paris, naïve 東京 🙂?"}
PARIS = {"role": "assistant", "content": "The capital of France\n\nis **Paris**, of course: 東京 🙂!"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}},
    ],
}
#: Conversations of every kind.
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "single": [USER, FOUR],
    "multi": [USER, FOUR, AGAIN, PARIS, USER, FOUR],
    "system": [{"role": "system", "content": "Be brief."}, USER, FOUR, AGAIN, PARIS],
    "tool": [USER, CALL, {"role": "tool", "content": '{"degrees": 2}'}, PARIS],
    "reasoning": [USER, {**FOUR, "content": "<think>\nTwo and two.\n</think>\n\nIt is four."}],
}

_ONLY = "only system, user and assistant are known"
_NO_CALLS = "leaves out the tool calls of message 2"


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: of the template's file.
        tokens: control tokens, as the tokenizer has them.
        end: what ends an answer.
        eos: what ends a text, where that is another token.
        refused: kinds of conversations that it cannot say, each with a part of the reason that is given.
    """

    name: str
    tokens: tuple[str, ...]
    end: str
    bos: str | None = None
    eos: str | None = None
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text("utf-8")

    def tokenizer(self) -> Any:
        return make_tokenizer(self.template, self.tokens, bos=self.bos, eos=self.eos or self.end)


_QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]")
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
_COMMAND = (
    "<BOS_TOKEN>",
    "<EOS_TOKEN>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)
FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", _QWEN[:3], "<|im_end|>", refused={"tool": _NO_CALLS}),
        Family("llama2", ("<s>", "</s>"), "</s>", bos="<s>", refused={"tool": _ONLY}),
        Family("llama3", _LLAMA3, "<|eot_id|>", bos="<|begin_of_text|>"),
        Family("mistral", _MISTRAL, "</s>", bos="<s>"),
        Family(
            "gemma",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            "<end_of_turn>",
            bos="<bos>",
            eos="<eos>",
            refused={"system": "System role not supported", "tool": "Tool role not supported"},
        ),
        Family(
            "phi",
            ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
            "<|end|>",
            eos="<|endoftext|>",
            refused={"tool": _NO_CALLS},
        ),
        Family("qwen", _QWEN, "<|im_end|>"),
        Family(
            "deepseek",
            _DEEPSEEK,
            "<｜end▁of▁sentence｜>",
            bos="<｜begin▁of▁sentence｜>",
            refused={"tool": _ONLY},
        ),
        Family("zephyr", ("<s>", "</s>"), "</s>", bos="<s>", refused={"tool": _ONLY}),
        Family("vicuna", ("<s>", "</s>"), "</s>", bos="<s>", refused={"tool": _ONLY}),
        Family("alpaca", ("<s>", "</s>"), "</s>", bos="<s>", refused={"tool": _ONLY}),
        Family("command_r", _COMMAND, "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>", eos="<EOS_TOKEN>"),
        Family(
            "granite",
            ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
            "<|end_of_text|>",
        ),
    )
}
