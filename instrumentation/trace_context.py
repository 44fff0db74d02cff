"""W3C trace context: parsing ``traceparent`` and making new ids."""

from __future__ import annotations

import random
from typing import NamedTuple

_HEX = frozenset("0123456789abcdef")
_RANDOM = random.SystemRandom()  # safe across fork, where a seeded generator would repeat ids


class TraceContext(NamedTuple):
    """``trace_id`` (128 bit), ``span_id`` (64 bit, 0: no parent) and the sampled ``flags``."""

    trace_id: int
    span_id: int
    flags: int

    def header(self) -> str:
        """The ``traceparent`` header that makes ``span_id`` the parent."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"


def new_span_id() -> int:
    """A random non-zero 64-bit id."""
    return _RANDOM.getrandbits(64) or 1


def new_trace() -> TraceContext:
    """A new sampled trace without a parent."""
    return TraceContext(_RANDOM.getrandbits(128) or 1, 0, 1)


def parse_traceparent(header: str | None) -> TraceContext | None:
    """Parse a ``traceparent`` header; ``None`` if it is absent or not valid by the W3C rules."""
    if not header:
        return None
    parts = header.strip().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2]:
        return None
    version, trace, span, flags = parts[:4]
    if version == "ff" or (version == "00" and len(parts) != 4):
        return None
    if not all(_HEX.issuperset(part) for part in parts[:4]):
        return None
    trace_id, span_id = int(trace, 16), int(span, 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, int(flags, 16))
