"""The agent's account of itself: counters and gauges, on top of prometheus_client.

Names are given bare (``receiver_accepted_spans``) and appear with the prefix
``stratoscope_agent_`` (and ``_total`` on counters): the OpenTelemetry Collector's own
``otelcol_*`` names where it has one for the same thing. Everything registers in one
``CollectorRegistry`` an agent, so that several agents can live in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from stratoscope.collector.component import Signal

PREFIX: Final = "stratoscope_agent_"
ITEM_NAME: Final = {Signal.TRACES: "spans", Signal.METRICS: "metric_points", Signal.LOGS: "log_records"}


class Telemetry:
    """Makes metrics on demand; asking again for the same name returns the same metric."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry(auto_describe=True)
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """A thread-safe counter; ``.labels(...).inc(n)``, or ``.inc(n)`` without labels."""
        with self._lock:
            if name not in self._counters:
                self._counters[name] = Counter(PREFIX + name, help, labels, registry=self.registry)
            return self._counters[name]

    def item_counters(self, verb: str, help: str, labels: Sequence[str]) -> dict[Signal, Counter]:
        """One counter a signal, named like ``receiver_accepted_spans`` for ``receiver_accepted``."""
        return {signal: self.counter(f"{verb}_{ITEM_NAME[signal]}", help, labels) for signal in Signal}

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """A thread-safe gauge; ``.set(x)``, ``.set_function(f)``."""
        with self._lock:
            if name not in self._gauges:
                self._gauges[name] = Gauge(PREFIX + name, help, labels, registry=self.registry)
            return self._gauges[name]

    def snapshot(self) -> dict[str, float]:
        """Current values of the agent's own metrics, keyed ``name{label="value"}``, for JSON."""
        values: dict[str, float] = {}
        for metric in self.registry.collect():
            if not metric.name.startswith(PREFIX):
                continue
            for sample in metric.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                name = sample.name.removeprefix(PREFIX)
                values[f"{name}{{{labels}}}" if labels else name] = sample.value
        return values

    def value(self, name: str, **labels: str) -> float:
        """One sample by its bare sample name (counters end in ``_total``); 0.0 when absent."""
        return self.registry.get_sample_value(PREFIX + name, labels) or 0.0
