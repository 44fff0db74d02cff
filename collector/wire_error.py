"""Finds where a protobuf payload breaks the wire format, for error messages.

protobuf's own parser says only that it failed. This slow walk runs after such a failure, and gives
up (``None``) after a bounded amount of work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

MAX_FIELDS: Final = 20_000
MAX_DEPTH: Final = 100  # the parser's own limit


@dataclass(frozen=True, slots=True)
class WireError:
    """The first thing wrong: ``offset`` is in bytes from the start of the payload."""

    offset: int
    reason: str


class _Found(Exception):
    def __init__(self, offset: int, reason: str) -> None:
        self.error = WireError(offset, reason)


class _GiveUp(Exception):
    pass


def find_wire_error(descriptor: Any, raw: bytes) -> WireError | None:
    """The first error of ``raw`` as a message of ``descriptor``; ``None`` if none was found."""
    stack = [(descriptor, 0, len(raw), 0)]
    fields = 0
    try:
        while stack:
            message, at, end, depth = stack.pop()
            if depth > MAX_DEPTH:
                return WireError(at, f"messages are nested more than {MAX_DEPTH} deep")
            while at < end:
                fields += 1
                if fields > MAX_FIELDS:
                    return None
                child, begin, at = _field(message, raw, at, end)
                if child is not None:  # go down first, come back for the rest
                    stack.append((message, at, end, depth))
                    message, at, end, depth = child, begin, at, depth + 1
                    if depth > MAX_DEPTH:
                        return WireError(begin, f"messages are nested more than {MAX_DEPTH} deep")
    except _Found as found:
        return found.error
    except _GiveUp:
        pass
    return None


def _field(message: Any, raw: bytes, at: int, end: int) -> tuple[Any, int, int]:
    """Read one field: (descriptor of a nested message or None, where its value begins, ends)."""
    start = at
    tag, at = _varint(raw, at, end)
    number, wire_type = tag >> 3, tag & 7
    if number == 0 or number >= 1 << 29:
        raise _Found(start, f"field number {number} is not allowed")
    name = f"field {number} of {message.name}"
    if wire_type == 0:
        return None, at, _varint(raw, at, end)[1]
    if wire_type in (1, 5):
        size = 8 if wire_type == 1 else 4
        if at + size > end:
            raise _Found(at, f"{name} ends early")
        return None, at, at + size
    if wire_type != 2:  # 3 and 4 are groups, which the parser skips: not followed here
        raise _Found(start, f"{name} has wire type {wire_type}") if wire_type > 4 else _GiveUp
    size, at = _varint(raw, at, end)
    if at + size > end:
        raise _Found(at, f"{name} says it has {size} bytes, but {end - at} are left")
    field = message.fields_by_number.get(number)
    if field is not None and field.message_type is not None:
        return field.message_type, at, at + size
    if field is not None and field.type == field.TYPE_STRING:
        try:
            raw[at : at + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Found(at + error.start, f"{name} ({field.name}) is not valid UTF-8") from None
    return None, at, at + size


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    start = at
    while at < end:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise _Found(start, "a varint is longer than 10 bytes")
    raise _Found(start, "a varint ends early")
