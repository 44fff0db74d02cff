"""OTLP attributes as Python values, read once, and typed when they are asked for."""

from __future__ import annotations

from typing import Any, Final

MAX_TEXT: Final = 256
_MISSING: Final = object()


class Bad(ValueError):
    """An attribute is missing or has the wrong type; the text names it."""


class Attributes(dict[str, Any]):
    """Values by key. Each method raises :class:`Bad`, for a wrong type always, for a missing key
    where no default is given. Text is cut at ``MAX_TEXT`` characters."""

    __slots__ = ()

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """An int64."""
        value = self.get(key, default)
        if value.__class__ is int:
            return value
        raise self._problem(key, value, "an integer")

    def text(self, key: str, default: Any = _MISSING) -> str:
        """A string."""
        value = self.get(key, default)
        if value.__class__ is str:
            return value if len(value) <= MAX_TEXT else value[:MAX_TEXT]
        raise self._problem(key, value, "a string")

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if value.__class__ is bool:
            return value
        raise self._problem(key, value, "a boolean")

    def data(self, key: str, default: Any = _MISSING) -> bytes:
        """Bytes."""
        value = self.get(key, default)
        if value.__class__ is bytes:
            return value
        raise self._problem(key, value, "bytes")

    def texts(self, key: str, default: Any = _MISSING) -> tuple[str, ...]:
        """An array of strings."""
        value = self.get(key, default)
        if value.__class__ is tuple and all(item.__class__ is str for item in value):
            return value
        raise self._problem(key, value, "an array of strings")

    def scalar(self, key: str) -> bool | int | float | str | None:
        """A boolean, number or string; ``None`` if it is missing."""
        value = self.get(key)
        if value is None or value.__class__ in (bool, int, float):
            return value
        if value.__class__ is str:
            return value[:MAX_TEXT]
        raise self._problem(key, value, "a scalar")

    def _problem(self, key: str, value: Any, wanted: str) -> Bad:
        if value is _MISSING:
            return Bad(f"{key} is missing")
        return Bad(f"{key}: must be {wanted}, not {type(value).__name__}")


def read_attributes(pairs: Any) -> Attributes:
    """All attributes of a span or resource; the last of a repeated key wins.

    A chain of comparisons, because this runs for every attribute that arrives.
    """
    attributes = Attributes()
    for pair in pairs:
        value = pair.value
        kind = value.WhichOneof("value")
        if kind == "int_value":
            attributes[pair.key] = value.int_value
        elif kind == "string_value":
            attributes[pair.key] = value.string_value
        elif kind == "bytes_value":
            attributes[pair.key] = value.bytes_value
        elif kind == "array_value":
            attributes[pair.key] = tuple(_item(item) for item in value.array_value.values)
        elif kind == "bool_value":
            attributes[pair.key] = value.bool_value
        elif kind == "double_value":
            attributes[pair.key] = value.double_value
        elif kind is not None:
            attributes[pair.key] = {}
    return attributes


def _item(value: Any) -> Any:
    return value.string_value if value.WhichOneof("value") == "string_value" else None
