"""Files of records with lengths: TensorBoard's events, and what protocol buffers are made of.

Enough of both to read numbers, without the libraries that wrote them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Field = tuple[int, int, "bytes | int"]
"""Number and wire type of a field of a message, and its value."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LENGTH = struct.Struct("<Q")
#: TFRecord: length, its checksum, data, their checksum.
_BEFORE, _BEHIND = 12, 4
#: Bits of a number that is encoded in sevens.
_MOST_BITS = 70


def records(data: bytes, position: int = 0) -> Iterator[tuple[int, bytes]]:
    """Whole records of a TensorBoard file, and where each ends; what a kill cut off is left out."""
    while position + _BEFORE <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        end = position + _BEFORE + length + _BEHIND
        if end > len(data):
            return
        yield end, data[position + _BEFORE : end - _BEHIND]
        position = end


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a message, as far as it is whole."""
    position = 0
    while position < len(message):
        tag, position = _number(message, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _number(message, position)
            yield tag >> 3, kind, value
            continue
        if kind == _BYTES:
            length, position = _number(message, position)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            return  # groups, which nobody writes any more, or no message at all
        if position + length > len(message):
            return
        yield tag >> 3, kind, message[position : position + length]
        position += length


def _number(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < _MOST_BITS:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, position
