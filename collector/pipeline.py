"""Wires components into pipelines: receivers -> processors -> exporters, as configured."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from stratoscope.collector.component import Batch, Component, Consumer, Context, Kind, Refused, Signal
from stratoscope.collector.config import AgentConfig, ComponentSpec, PipelineConfig

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pipelines:
    """All components of an agent, in the order in which data passes them.

    Start in the order extensions, exporters, processors (last first), receivers; shut down in the
    order receivers, processors (first first), exporters, extensions.
    """

    extensions: list[tuple[str, Any]] = field(default_factory=list)
    receivers: list[tuple[str, Any]] = field(default_factory=list)
    processors: list[tuple[str, Any]] = field(default_factory=list)
    exporters: list[tuple[str, Any]] = field(default_factory=list)

    def start_order(self) -> list[tuple[str, Component]]:
        """Components that have a life, consumers before producers."""
        order = self.extensions + self.exporters + self.processors[::-1] + self.receivers
        return [(name, part) for name, part in order if isinstance(part, Component)]

    def stop_order(self) -> list[tuple[str, Component]]:
        """Components that have a life, producers before consumers."""
        order = self.receivers + self.processors + self.exporters + self.extensions
        return [(name, part) for name, part in order if isinstance(part, Component)]


class Guard:
    """Keeps a component's bug from spreading: logged, counted, refused for good."""

    def __init__(self, name: str, inner: Consumer, context: Context) -> None:
        self._name, self._inner = name, inner
        self._errors = context.telemetry.counter(
            "component_errors", "Unexpected exceptions in a component; see the log.", ("component",)
        ).labels(name)

    def consume(self, batch: Batch) -> None:
        """Pass on; only :class:`Refused` comes out."""
        try:
            self._inner.consume(batch)
        except Refused:
            raise
        except Exception as error:
            self._errors.inc()
            log.exception("%s: unexpected error", self._name)
            raise Refused(f"internal error in {self._name}; see the agent's log", retryable=False) from error


class FanOut:
    """Gives a batch to several consumers; every one gets it, whatever the others do.

    The sender is asked to try again only if nobody took the batch: else those who did would get it
    twice. The exporters count what they refused.
    """

    def __init__(self, consumers: list[Consumer]) -> None:
        self._consumers = consumers

    def consume(self, batch: Batch) -> None:
        """Pass on to all. Raises :class:`Refused` if none took it."""
        refusals: list[Refused] = []
        for consumer in self._consumers:
            try:
                consumer.consume(batch)
            except Refused as error:
                refusals.append(error)
        if len(refusals) == len(self._consumers):
            reason = "; ".join(error.reason for error in refusals)
            raise Refused(reason, all(error.retryable for error in refusals))


def build(config: AgentConfig, context: Context) -> Pipelines:
    """Make every component that a pipeline or ``service.extensions`` names; nothing starts yet."""
    parts = Pipelines()
    exporters: dict[str, Consumer] = {}
    inputs: dict[str, dict[Signal, list[Consumer]]] = {}
    for name, (signal, pipeline) in config.pipelines.items():
        for exporter_id in pipeline.exporters:
            if exporter_id not in exporters:
                spec = config.components[Kind.EXPORTER][exporter_id]
                exporter = spec.factory.build(name=exporter_id, config=spec.config, context=context)
                parts.exporters.append((f"exporters.{exporter_id}", exporter))
                exporters[exporter_id] = Guard(f"exporters.{exporter_id}", exporter, context)
        last = _join([exporters[exporter_id] for exporter_id in pipeline.exporters])
        head = _processors(config.components[Kind.PROCESSOR], name, signal, pipeline, last, parts, context)
        for receiver_id in pipeline.receivers:
            inputs.setdefault(receiver_id, {}).setdefault(signal, []).append(head)
    for extension_id in config.service.extensions:
        spec = config.components[Kind.EXTENSION][extension_id]
        extension = spec.factory.build(name=extension_id, config=spec.config, context=context)
        parts.extensions.append((f"extensions.{extension_id}", extension))
    for receiver_id, by_signal in inputs.items():
        spec = config.components[Kind.RECEIVER][receiver_id]
        consumers = {signal: _join(heads) for signal, heads in by_signal.items()}
        receiver = spec.factory.build(
            name=receiver_id, config=spec.config, consumers=consumers, context=context
        )
        parts.receivers.append((f"receivers.{receiver_id}", receiver))
    return parts


def _processors(
    specs: dict[str, ComponentSpec],
    pipeline_name: str,
    signal: Signal,
    pipeline: PipelineConfig,
    last: Consumer,
    parts: Pipelines,
    context: Context,
) -> Consumer:
    """Build a pipeline's processors from its end; returns the head."""
    head, built = last, []
    for processor_id in reversed(pipeline.processors):
        spec = specs[processor_id]
        name = f"processors.{processor_id}"
        processor = spec.factory.build(
            name=processor_id, config=spec.config, next=head, context=context, signal=signal
        )
        built.append((f"{name} in {pipeline_name}", processor))
        head = Guard(name, processor, context)
    parts.processors.extend(reversed(built))
    return head


def _join(consumers: list[Consumer]) -> Consumer:
    return consumers[0] if len(consumers) == 1 else FanOut(consumers)
