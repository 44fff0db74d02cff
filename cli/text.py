"""Text for terminals: foreign text made harmless, and numbers with units."""

from __future__ import annotations

import unicodedata
from typing import Any

MISSING = "-"


def clean(value: Any, limit: int = 200) -> str:
    """``value`` as one line without control, format or bidirectional characters, cut at ``limit``.

    Names and ids in traces come from whoever sent them; an escape sequence in one must not reach
    the terminal.
    """
    text = str(value)
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return "".join(c if unicodedata.category(c)[0] != "C" else "�" for c in text)


def duration(ms: float | None) -> str:
    """Milliseconds with the unit that suits: ``0 ms``, ``12 µs``, ``3.42 ms``, ``184 ms``, ``2.31 s``."""
    if ms is None:
        return MISSING
    size = abs(ms)
    if size == 0:
        return "0 ms"
    if size < 0.9995:
        return f"{ms * 1000:.0f} µs" if size >= 0.0005 else "<1 µs"
    if size < 999.5:
        return f"{_three(ms)} ms"
    return f"{_three(ms / 1000)} s"


def seconds(s: float | None) -> str:
    """Like :func:`duration`, from seconds."""
    return duration(None if s is None else s * 1000)


def percent(share: float | None) -> str:
    """A share of one as a percentage: ``45.1%``; ``·`` for nothing, ``<0.1%`` for nearly nothing."""
    if share is None:
        return MISSING
    if share == 0:
        return "·"
    if abs(share) < 0.0005:
        return "<0.1%"
    return f"{share * 100:.1f}%"


def count(number: int, one: str, many: str | None = None) -> str:
    """``1 request``, ``2 requests``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _three(value: float) -> str:
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{digits}f}"
