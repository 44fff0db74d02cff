"""Query parameters, checked, with errors that name the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


class BadParameter(ValueError):
    """A parameter cannot be used; ``name`` says which, the text why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class Query:
    """The parameters of one request. Raises :class:`BadParameter` for one that is not ``allowed``."""

    def __init__(self, values: Mapping[str, str], allowed: Sequence[str]) -> None:
        self._values = values
        for name in values:
            if name not in allowed:
                hint = f"allowed: {', '.join(allowed)}" if allowed else "none is allowed here"
                raise BadParameter(name[:80], f"unknown parameter; {hint}")

    def text(self, name: str) -> str | None:
        """As it is; ``None`` if it is missing or empty."""
        return self._values.get(name) or None

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """One of ``choices``, or ``None`` if it is missing."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise BadParameter(name, f"must be one of {', '.join(choices)}, not {value[:80]!r}")
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self.text(name)
        if value is None:
            return default
        # int() takes far more than digits, and thousands of them slowly
        if not (value.isascii() and value.isdigit() and len(value) <= 20 and low <= int(value) <= high):
            raise BadParameter(name, f"must be a whole number from {low} to {high}, not {value[:80]!r}")
        return int(value)

    def seconds(self, name: str) -> float | None:
        """A positive number of seconds, at most 366 days; ``None`` if it is missing."""
        value = self.text(name)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number <= 366 * 86400:
            raise BadParameter(name, f"must be a number of seconds, more than 0, not {value[:80]!r}")
        return number
