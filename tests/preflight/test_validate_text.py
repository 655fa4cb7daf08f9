"""Wrongly decoded text and odd characters are seen; languages and code are not taken for them."""

from __future__ import annotations

import pytest

from palingenesis.preflight.checks.text import SCRIPTS, control_characters, mojibake, script_of

FINE = [
    "plain",
    "naïve café, señor, ÂME, Ça va, AÇÃO, São João, Ñandú, Ärger, Ö",
    "“quotes” – and — dashes… ‘so’ €5 ™",
    "Съешь же ещё этих мягких французских булок",
    "Ελληνικά και ένα",
    "東京 🙂 👩‍👩‍👧 한국어 हिन्दी ไทย",
    "Вчера Ð не было",
    "â",
    "Ñ¿?".replace("¿", " "),
]


@pytest.mark.parametrize("text", FINE)
def test_text_as_it_should_be(text: str) -> None:
    assert mojibake(text) == ""
    assert control_characters(text) == ""


@pytest.mark.parametrize("text", ["é", "l’été", "“quotes”", "naïve", "ü", "ñ", "Съешь", "🙂", "…", "—"])
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_utf_8_read_as_something_else(text: str, encoding: str) -> None:
    wrong = text.encode("utf-8").decode(encoding, errors="replace")
    assert mojibake(f"before {wrong} after")


def test_characters_that_nobody_types() -> None:
    for letter in "\x00\x07\x1b\x7f\x9b\u202e\u2066\ufeff":
        assert control_characters(f"a{letter}b")
    assert control_characters("a\tb\nc\r\n") == ""


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello, how are you?", "Latin"),
        ("déjà vu à la française", "Latin"),
        ("Съешь же ещё", "Cyrillic"),
        ("東京へ行きます", "Kana"),
        ("我们去北京", "Han"),
        ("안녕하세요", "Hangul"),
        ("مرحبا بالعالم", "Arabic"),
        ("12 + 3 = 15", "none"),
        ("x = 1", "none"),
    ],
)
def test_the_script_of_a_text(text: str, script: str) -> None:
    assert SCRIPTS[script_of(text)] == script
