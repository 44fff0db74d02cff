"""What the parts of a pipeline are to each other.

A *receiver* decodes what arrives into a :class:`Batch` and hands it to the first
:class:`Consumer` of a pipeline; processors and exporters are consumers too. A consumer that cannot
take a batch raises :class:`Refused`, which the receiver turns into the answer that its sender
understands. Everything with threads or sockets is also a :class:`Component`.

Each component type is described by one :class:`Factory`; ``collector/registry.py`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from google.protobuf.message import Message

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from stratoscope.collector.telemetry import Telemetry


class Signal(StrEnum):
    """The three OTLP signals."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"


@dataclass(slots=True)
class Batch:
    """One OTLP export request on its way through a pipeline. Consumers must not change it."""

    signal: Signal
    message: (
        Message  # parsed ExportTraceServiceRequest, ExportMetricsServiceRequest or ExportLogsServiceRequest
    )
    raw: bytes  # the same, serialised: what is forwarded
    items: int  # spans, data points or log records


class Refused(Exception):
    """A consumer cannot take a batch now (``retryable``) or ever.

    ``reason`` is a sentence for the sender; ``retry_after_s`` is a hint for when to try again.
    """

    def __init__(self, reason: str, retryable: bool, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
        self.retry_after_s = retry_after_s


@runtime_checkable
class Consumer(Protocol):
    """Takes batches. Called from many threads at once."""

    def consume(self, batch: Batch) -> None:
        """Take ``batch``, or raise :class:`Refused`."""


@runtime_checkable
class Component(Protocol):
    """Has a life: started before the first batch, shut down after the last."""

    def start(self) -> None:
        """Acquire sockets, files and threads. Raises ``OSError`` or ``StartError`` if it cannot."""

    def shutdown(self, timeout_s: float) -> None:
        """Flush what is held and release everything, within ``timeout_s`` seconds."""


class StartError(Exception):
    """A component cannot start; the text names the config key, its value and the reason."""


class Kind(StrEnum):
    """The sections of the configuration file that hold components."""

    RECEIVER = "receivers"
    PROCESSOR = "processors"
    EXPORTER = "exporters"
    EXTENSION = "extensions"


@dataclass(slots=True)
class Context:
    """What the components of one agent share."""

    telemetry: Telemetry
    registry: CollectorRegistry
    attribution: Any = None  # set by the attribution processor's factory
    metrics: Any = None  # RequestMetrics, made by the first api extension
    prometheus: bool = False  # set by the prometheus exporter's factory: serve /metrics
    started_wall_ns: int = 0  # time.time_ns() when the agent started
    status: dict[str, Any] = field(default_factory=dict)  # version, pipelines: for the JSON API


_Class = type[Any]  # Factory.type would shadow the builtin


@dataclass(frozen=True, slots=True)
class Factory:
    """One component type: the dataclass of its configuration, and how to build it.

    ``config`` is a dataclass whose fields (see ``collector/config_schema.py`` for the types they
    may have) are the keys allowed under ``<kind>.<id>``; all fields need defaults unless required.
    ``build`` is called once for each pipeline that names the component (once in all for
    extensions and receivers, and for exporters) with keyword arguments:

    ========== ==========================================================================
    receivers  ``name, config, consumers, context``  (consumers: ``dict[Signal, Consumer]``)
    processors ``name, config, next, context, signal`` -> Consumer, Component too if it lives
    exporters  ``name, config, context`` -> Consumer, Component too if it lives
    extensions ``name, config, context`` -> Component
    ========== ==========================================================================

    ``name`` is the full component id, such as ``otlp/backend``.
    Processors are built after exporters and before extensions and receivers.
    """

    kind: Kind
    type: str
    config: _Class
    build: Callable[..., Any]
    signals: frozenset[Signal] = frozenset(Signal)
