"""Which component types there are, and where each one's :class:`Factory` lives.

Modules are imported when a configuration names them, so an agent pays only for what it uses.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Final, cast

from stratoscope.collector.component import Factory, Kind

_HOME: Final = "stratoscope.collector"
_FACTORIES: Final[dict[Kind, dict[str, str]]] = {
    Kind.RECEIVER: {"otlp": "receivers.otlp:factory"},
    Kind.PROCESSOR: {
        "memory_limiter": "processors.memory_limiter:factory",
        "attribution": "processors.attribution:factory",
        "batch": "processors.batch:factory",
    },
    Kind.EXPORTER: {
        "otlp": "exporters.otlp:grpc_factory",
        "otlphttp": "exporters.otlp:http_factory",
        "file": "exporters.file:factory",
        "debug": "exporters.debug:factory",
        "nop": "exporters.debug:nop_factory",
        "prometheus": "exporters.prometheus:factory",
    },
    Kind.EXTENSION: {"api": "api:factory"},
}


def types(kind: Kind) -> list[str]:
    """The component types of one section, sorted."""
    return sorted(_FACTORIES[kind])


@cache
def find(kind: Kind, type_name: str) -> Factory:
    """The factory of a component type. Raises ``KeyError`` for an unknown one."""
    module, _, attribute = _FACTORIES[kind][type_name].partition(":")
    return cast(Factory, getattr(importlib.import_module(f"{_HOME}.{module}"), attribute))
