"""Reads nested dictionaries into dataclasses, collecting every problem with its full key path.

A configuration dataclass declares its keys as fields made by :func:`key`. Field types: ``bool``,
``int``, ``float``, ``str``, ``Literal[...]``, ``list[str]``, ``dict[str, str]``, another such
dataclass, ``X | None``, and ``Annotated`` with a rule of this module::

    @dataclass(frozen=True)
    class Config:
        timeout: Annotated[float, Duration(min_s=0.001)] = key(0.2, "How long a batch may wait.")
        endpoint: Annotated[str, Endpoint()] = key("127.0.0.1:4317", "Where to listen.")

        def validate(self) -> Iterable[tuple[str, str]]:  # optional: rules over several keys
            ...  # yield (key, problem)

An optional dataclass that is named without a value (``grpc:``) takes its defaults, as in the
OpenTelemetry Collector.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import yaml

Problems = list[str]
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ns|us|µs|ms|s|m|h)")


class Expanded(str):
    """A value that came whole from ``${env:...}``: text, until a key wants another type."""


@dataclass(frozen=True)
class Duration:
    """Rule for a float of seconds written as ``5s``, ``200ms``, ``1m30s``."""

    min_s: float = 0.0
    max_s: float = 86400.0


@dataclass(frozen=True)
class Range:
    """Rule for a number between ``low`` and ``high``, both included."""

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Endpoint:
    """Rule for ``host:port``; with ``url`` a full ``http(s)://`` address is wanted or allowed."""

    url: Literal["no", "allowed", "required"] = "no"


def key(default: Any, help: str) -> Any:
    """A configuration key with a default and one sentence of documentation."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def required(help: str) -> Any:
    """A configuration key that must be given, with one sentence of documentation."""
    return dataclasses.field(metadata={"help": help})


def split_endpoint(text: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` to its parts. Raises ``ValueError`` with the reason."""
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError("must be host:port")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be host:port with a port between 0 and 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("must be host:port; put an IPv6 address in brackets, [::1]:4317")
    return host.strip("[]"), int(port)


def parse_duration(value: Any) -> float:
    """Seconds of ``1m30s``-like text. Raises ``ValueError`` with the reason."""
    if value == 0 and not isinstance(value, bool):
        return 0.0
    text = str(value).strip() if isinstance(value, str) else ""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("must be a duration with a unit: 200ms, 5s, 1m30s")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def unknown_key(path: str, name: str, allowed: Iterable[str]) -> str:
    """The problem text for a key or reference that does not exist."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{path}: unknown key; {hint}allowed: {', '.join(names) or 'nothing'}"


def read(cls: type[Any], data: Any, path: str, problems: Problems) -> Any:
    """An instance of dataclass ``cls`` from ``data``, or ``None`` after adding to ``problems``."""
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        problems.append(f"{path}: must be a mapping of keys, got {_show(data)}")
        return None
    before = len(problems)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    for name, value in data.items():
        where = f"{path}.{name}" if path else str(name)
        if name not in fields:
            problems.append(unknown_key(where, str(name), fields))
        else:
            values[str(name)] = _read_value(hints[name], value, where, problems)
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in data:
            problems.append(f"{path}.{name}: is required")
    if len(problems) > before:
        return None
    config = cls(**values)
    for name, problem in config.validate() if hasattr(config, "validate") else ():
        problems.append(f"{path}.{name}: {problem}" if name else f"{path}: {problem}")
    return config


def _read_value(hint: Any, value: Any, path: str, problems: Problems) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in args if a is not types.NoneType)
        if value is None and not dataclasses.is_dataclass(inner):
            return None
        return _read_value(inner, value, path, problems)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read(hint, value, path, problems)
    if origin is list or origin is dict:
        return _read_container(origin, value, path, problems)
    try:
        if origin is Annotated:
            return _check_rules(args[0], args[1:], value)
        if origin is Literal:
            text = _scalar(str, value)
            if text not in args:
                raise ValueError(f"must be one of {', '.join(map(str, args))}")
            return text
        return _scalar(hint, value)
    except ValueError as error:
        problems.append(f"{path}: {error}, got {_show(value)}")
        return None


def _read_container(origin: Any, value: Any, path: str, problems: Problems) -> Any:
    if value is None:
        return origin()
    value = _retype(value)
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, origin) or not all(_is_text(item) for item in items):
        what = "a list of text values" if origin is list else "a mapping of names to text values"
        problems.append(f"{path}: must be {what}, got {_show(value)}")
        return None
    if isinstance(value, dict):
        return {str(name): _scalar(str, item) for name, item in value.items()}
    return [_scalar(str, item) for item in value]


def _check_rules(base: Any, rules: tuple[Any, ...], value: Any) -> Any:
    for rule in rules:
        if isinstance(rule, Duration):
            seconds = parse_duration(value)
            if not rule.min_s <= seconds <= rule.max_s:
                raise ValueError(f"must be between {rule.min_s:g}s and {rule.max_s:g}s")
            return seconds
        if isinstance(rule, Range):
            value = _scalar(base, value)
            if rule.low is not None and value < rule.low:
                raise ValueError(f"must be at least {rule.low:.15g}")
            if rule.high is not None and value > rule.high:
                raise ValueError(f"must be at most {rule.high:.15g}")
        if isinstance(rule, Endpoint):
            value = _scalar(str, value)
            _check_endpoint(value, rule)
    return value


def _check_endpoint(text: str, rule: Endpoint) -> None:
    scheme, separator, rest = text.partition("://")
    if not separator:
        if rule.url == "required":
            raise ValueError("must be a URL: http://host:port or https://host:port")
        split_endpoint(text)
    elif rule.url == "no":
        raise ValueError("must be host:port without a scheme")
    elif scheme not in ("http", "https") or not rest:
        raise ValueError("must begin with http:// or https://")


def _scalar(base: Any, value: Any) -> Any:
    if base is str:
        if _is_text(value):
            return str(value)
        raise ValueError("must be text")
    value = _retype(value)
    if base is bool and isinstance(value, bool):
        return value
    if base is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if base is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(
        f"must be {'true or false' if base is bool else 'a whole number' if base is int else 'a number'}"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _retype(value: Any) -> Any:
    """What an expanded ``${env:...}`` would be, had its text stood in the file."""
    if not isinstance(value, Expanded):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return str(value)


def _show(value: Any) -> str:
    text = repr(str(value) if isinstance(value, Expanded) else value)
    return text if len(text) <= 80 else text[:77] + "..."
