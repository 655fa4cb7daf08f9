"""Logs cut, spliced, with bytes flipped: what disks, crashes and concatenation leave."""

from __future__ import annotations

import random

from tests.runlogs.written import ALL

_TEXTS = [written.text.encode() for written in ALL.values()]
#: The beginning and the end of each: most logs are damaged in as many ways in a tenth of the time.
_SHORT = [b"\n".join([*text.split(b"\n")[:8], *text.split(b"\n")[-3:]]) for text in _TEXTS]
_SHARE_SHORT = 0.9
_WORDS = [
    b"\n", b"\r", b"\r\n", b"\x00", b"\xff\xfe", b"nan", b"-inf", b"{", b"}", b"[", b'"', b"'", b",", b"=",
    b":", b"1e999", b"-0", b"\x1b[31m", b"9" * 30, b"step=1 loss=2.5 ", b'{"loss": ', b"{'loss': ",
    b"Traceback (most recent call last):\n", b"OVERFLOW!", b"\xe2\x96\x88", b"epoch,step,train_loss\n", b" ",
    b"[rank3]: ", b"|", b"  3%|x| 1/9 [", b"\x1b]",
]  # fmt: skip


def damaged(seed: int) -> bytes:
    """A log that was damaged in a few ways."""
    rng = random.Random(seed)
    texts = _SHORT if rng.random() < _SHARE_SHORT else _TEXTS
    data = rng.choice(texts)
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data) + 1)] + rng.choice(texts)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        data = rng.choice((_cut, _splice, _flip, _insert, _repeat, _drop))(data, rng)
    return data[:40_000]


def _cut(data: bytes, rng: random.Random) -> bytes:
    first, last = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return data[first:] if rng.random() < 0.3 else data[:last] if rng.random() < 0.6 else data[first:last]


def _splice(data: bytes, rng: random.Random) -> bytes:
    other, place = rng.choice(_SHORT), rng.randrange(len(data) + 1)
    first = rng.randrange(len(other))
    return data[:place] + other[first : first + rng.randrange(2000)] + data[place:]


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 5, 50)) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(_WORDS) * rng.choice((1, 1, 3, 200)) + data[place:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    first = rng.randrange(len(data) + 1)
    return data + data[first : first + rng.randrange(5000)] * rng.choice((1, 4))


def _drop(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    return b"\n".join(one for one in lines if rng.random() > rng.choice((0.02, 0.3)))
