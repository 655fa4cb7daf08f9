"""Trains on nothing: a template without marks, whose answers cannot be told from what is around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases.build import checked, rows, save_model

EXPECTED = ("masking.template_refused",)


#: Without marks, and with no token of its own after an answer: where one ends is anybody's guess.
ENDLESS = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ 'assistant: ' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def run(folder: Path, *, healthy: bool) -> Any:
    save_model(folder / "model", template=MARKED if healthy else ENDLESS)
    return checked(folder, rows())
