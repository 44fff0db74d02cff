"""Samples become OpenTelemetry metrics: GPU quantities and the hook's own account.

The flush thread gathers :class:`Sample` objects and exports them in one go::

    exporter = metric_exporter(settings.protocol)
    if exporter is not None:
        samples = sampler.drain() + account_samples(account, {sc.ROLE: "worker"}, now_ns)
        exporter.export(build(resource, samples, start_ns, now_ns))

There is no OpenTelemetry meter, view or reader in between: values are read where they arise, and
the SDK's aggregation would only cost memory and a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from . import semconv as sc
from .account import Account
from .clock import wall_minus_monotonic_ns

Kind = Literal["gauge", "counter", "updown"]


class Sample(NamedTuple):
    """One value of one series at one time.

    ``kind`` is ``gauge`` (a reading), ``counter`` (cumulative since the hook started, never falls)
    or ``updown`` (an amount that can be added over series). ``time_ns`` is ``time.monotonic_ns()``.
    """

    name: str
    unit: str
    description: str
    kind: Kind
    value: int | float
    attributes: Mapping[str, Any]
    time_ns: int


def build(resource: Resource, samples: Iterable[Sample], start_ns: int, now_ns: int) -> MetricsData:
    """Metrics for one export, in order of first appearance; empty ``samples`` give no metrics.

    ``start_ns`` (monotonic) is when counting began in this process. A sample without a time of its
    own (0) gets ``now_ns``. Monotonic times become Unix times by the resource's
    ``stratoscope.clock.wall_minus_monotonic_ns``, the same offset that the spans use.
    """
    offset_ns = _wall_offset_ns(resource)
    start_unix_ns = start_ns + offset_ns
    first: dict[str, Sample] = {}
    points: dict[str, list[NumberDataPoint]] = {}
    for sample in samples:
        first.setdefault(sample.name, sample)
        points.setdefault(sample.name, []).append(
            NumberDataPoint(
                attributes=sample.attributes,
                start_time_unix_nano=0 if sample.kind == "gauge" else start_unix_ns,
                time_unix_nano=(sample.time_ns or now_ns) + offset_ns,
                value=sample.value,
                exemplars=(),
            )
        )
    metrics = [
        Metric(name, sample.description, sample.unit, _data(sample.kind, points[name]))
        for name, sample in first.items()
    ]
    if not metrics:
        return MetricsData([])
    scope = InstrumentationScope(sc.SCOPE_NAME, str(resource.attributes.get(sc.HOOK_VERSION, "")))
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])


def _data(kind: Kind, points: list[NumberDataPoint]) -> Gauge | Sum:
    if kind == "gauge":
        return Gauge(points)
    return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=kind == "counter")


def _wall_offset_ns(resource: Resource) -> int:
    offset = resource.attributes.get(sc.WALL_OFFSET_NS)
    return offset if isinstance(offset, int) else wall_minus_monotonic_ns()


_ACCOUNT = (
    ("steps", sc.HOOK_STEPS, "{step}", "Engine steps recorded."),
    ("requests", sc.HOOK_REQUESTS, "{request}", "Requests recorded."),
    (
        "critical_ns",
        sc.HOOK_CRITICAL_NS,
        "ns",
        "Time of the hook on the engine's critical path.",
    ),
    (
        "overlapped_ns",
        sc.HOOK_OVERLAPPED_NS,
        "ns",
        "Time of the hook while the workers execute.",
    ),
    ("request_ns", sc.HOOK_REQUEST_NS, "ns", "Time of the hook's per-request work."),
    ("flush_cpu_ns", sc.HOOK_FLUSH_CPU_NS, "ns", "CPU time of the flush thread."),
    (
        "dropped",
        sc.HOOK_DROPPED,
        "{record}",
        "Records lost to a full buffer or a failed export.",
    ),
    ("errors", sc.HOOK_ERRORS, "{error}", "Exceptions inside the hook, all caught."),
)


def account_samples(account: Account, attributes: Mapping[str, Any], now_ns: int) -> list[Sample]:
    """The hook's own counters as cumulative sums, at ``now_ns`` (monotonic)."""
    return [
        Sample(
            name,
            unit,
            description,
            "counter",
            getattr(account, field),
            attributes,
            now_ns,
        )
        for field, name, unit, description in _ACCOUNT
    ]


def metric_exporter(protocol: str, environ: Mapping[str, str] | None = None) -> MetricExporter | None:
    """The standard OTLP metric exporter; ``None`` where no endpoint for metrics is configured.

    ``protocol`` (``grpc`` or ``http/protobuf``) is what traces use;
    ``OTEL_EXPORTER_OTLP_METRICS_PROTOCOL`` overrides it for metrics. The exporter itself reads
    all other ``OTEL_EXPORTER_OTLP_*``. With only ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` set there
    is none, so that metrics do not go to a default address that nobody asked for.
    """
    env = os.environ if environ is None else environ
    if env.get("OTEL_METRICS_EXPORTER", "otlp").strip().lower() == "none":
        return None
    if not (env.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        return None
    chosen = env.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "").strip().lower()
    if (chosen if chosen in ("grpc", "http/protobuf") else protocol) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
            OTLPMetricExporter as GrpcExporter,
        )

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
        OTLPMetricExporter as HttpExporter,
    )

    return HttpExporter()
