"""Finished requests as Prometheus metrics, beside the agent's account of itself.

Cardinality is bounded: phases and causes are fixed, and after :data:`MAX_MODELS` model names the rest
are ``other``. A request is never a label; its trace id is the exemplar of the histograms.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from stratoscope.attribution.attribute import E2E, ITL, TTFT
from stratoscope.attribution.tables import Int64
from stratoscope.attribution.taxonomy import CELLS, N_CELLS, PHASES

from .finished import Finished

MAX_MODELS: Final = 50
MAX_PROCESSES: Final = 10_000
OTHER: Final = "other"
_BUCKETS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_ITL_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_HOOK: Final = {
    "steps": ("steps", 1.0, "Engine steps that the hook recorded."),
    "requests": ("requests", 1.0, "Requests that the hook recorded."),
    "critical_ns": ("critical_seconds", 1e-9, "Time of the hook on the engine's critical path."),
    "overlapped_ns": ("overlapped_seconds", 1e-9, "CPU time of the hook while the workers execute."),
    "request_ns": ("request_seconds", 1e-9, "Time of the hook's work per request."),
    "flush_cpu_ns": ("flush_cpu_seconds", 1e-9, "CPU time of the hook's flush thread."),
    "dropped": ("dropped_records", 1.0, "Records that the hook lost."),
    "errors": ("errors", 1.0, "Exceptions inside the hook, all caught."),
}


class Hooks(Protocol):
    """What tells the hooks' accounts: the attribution processor."""

    def hook_status(self) -> list[dict[str, Any]]:
        """One row a process: ``process_uid``, ``role`` and cumulative counters."""


class RequestMetrics:
    """Call :meth:`observe` with each finished request; the registry does the rest."""

    def __init__(self, registry: CollectorRegistry, hooks: Hooks) -> None:
        self._hooks = hooks
        self._lock = threading.Lock()
        self._cells_ns: dict[str, Int64] = {}  # by model: (phases, cells)
        self._requests: Counter[tuple[str, str]] = Counter()
        self._seen: OrderedDict[str, dict[str, int]] = OrderedDict()  # last account by process uid
        self._hook_totals: Counter[tuple[str, str]] = Counter()  # by role and name
        self._histograms = {
            phase: Histogram(
                f"stratoscope_{name}_seconds", text, ["model_name"], buckets=buckets, registry=registry
            )
            for phase, name, text, buckets in (
                (E2E, "e2e", "Latency from arrival to the last byte.", _BUCKETS_S),
                (TTFT, "ttft", "Latency from arrival to the first token.", _BUCKETS_S),
                (ITL, "itl", "A request's mean time between flushes of tokens.", _ITL_BUCKETS_S),
            )
        }
        registry.register(self)

    def observe(self, request: Finished) -> None:
        """Count one finished request."""
        model = str(request.attributes.get("model") or "unknown")
        with self._lock:
            if model not in self._cells_ns:
                if len(self._cells_ns) >= MAX_MODELS:
                    model = OTHER
                self._cells_ns.setdefault(model, np.zeros((len(PHASES), N_CELLS), np.int64))
            self._cells_ns[model] += request.cells_ns
            self._requests[str(request.attributes.get("outcome")), model] += 1
        exemplar = {"trace_id": request.trace_id}
        gaps = int(request.attributes.get("itl_gaps", 0))
        for phase, histogram in self._histograms.items():
            latency_ns = int(request.latency_ns[phase])
            if phase == ITL:
                if not gaps:
                    continue
                latency_ns //= gaps
            histogram.labels(model).observe(latency_ns / 1e9, exemplar)

    def collect(self) -> Iterator[Metric]:
        """The counters, for the registry."""
        seconds = CounterMetricFamily(
            "stratoscope_request_seconds",
            "Seconds of requests by phase and cause.",
            labels=["phase", "layer", "cause", "model_name"],
        )
        requests = CounterMetricFamily(
            "stratoscope_requests", "Finished requests.", labels=["outcome", "model_name"]
        )
        with self._lock:
            for model, cells in self._cells_ns.items():
                for phase, index in np.argwhere(cells).tolist():
                    cell = CELLS[index]
                    labels = [PHASES[phase], cell.layer, cell.cause, model]
                    seconds.add_metric(labels, int(cells[phase, index]) / 1e9)
            for (outcome, model), count in self._requests.items():
                requests.add_metric([outcome, model], count)
        yield seconds
        yield requests
        yield from self._hook()

    def describe(self) -> list[Metric]:
        """Nothing: names are known when they are collected."""
        return []

    def _hook(self) -> Iterator[Metric]:
        with self._lock:
            totals = Counter(self._totals())
        for name, (metric, unit, text) in _HOOK.items():
            family = CounterMetricFamily(f"stratoscope_hook_{metric}", text, labels=["role"])
            for role in sorted({role for role, _ in totals}):
                family.add_metric([role], totals[role, name] * unit)
            yield family

    def _totals(self) -> Counter[tuple[str, str]]:
        """Sums by role that never fall: each process adds what its counters grew by since last time.

        A process that the agent forgot and heard of again is known here still, up to
        :data:`MAX_PROCESSES` of them.
        """
        for row in self._hooks.hook_status():
            uid, role = str(row["process_uid"]), str(row["role"])
            before = self._seen.pop(uid, {})
            now = {name: int(row.get(name, 0)) for name in _HOOK}
            for name, value in now.items():
                self._hook_totals[role, name] += max(value - before.get(name, 0), 0)
            self._seen[uid] = now
            if len(self._seen) > MAX_PROCESSES:
                self._seen.popitem(last=False)
        return self._hook_totals
