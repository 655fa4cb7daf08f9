"""A PNG file with a palette, from a table of small numbers. The format: https://www.w3.org/TR/png-3/."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_BITS, _INDEXED = 8, 3
_NO_FILTER = 0


def encode(codes: NDArray[np.uint8], palette: Sequence[Colour]) -> bytes:
    """``codes`` ``[rows, columns]``, each the place of its colour in ``palette``."""
    rows, columns = codes.shape
    header = struct.pack(">IIBBBBB", columns, rows, _BITS, _INDEXED, 0, 0, 0)
    filtered = np.insert(codes, 0, _NO_FILTER, axis=1)
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", bytes(part for colour in palette for part in colour)),
            _chunk(b"IDAT", zlib.compress(np.ascontiguousarray(filtered).tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def data_uri(codes: NDArray[np.uint8], palette: Sequence[Colour]) -> str:
    """The same as an address that needs no file."""
    return "data:image/png;base64," + base64.b64encode(encode(codes, palette)).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
