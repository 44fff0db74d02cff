"""The flush thread: the only place where records become OTLP and leave the process.

It holds the interpreter lock for short stretches only (a batch of spans at a time, with a pause
between), so that vLLM's threads never wait long for it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from . import semconv as sc
from .clock import clock_domain, wall_minus_monotonic_ns
from .metrics import account_samples, build, metric_exporter
from .settings import Settings
from .spans import SpanBuilder

if TYPE_CHECKING:
    from .hook import Hook, Window

_logger = logging.getLogger("vllm.stratoscope")  # below vLLM's own, for its handler and prefix
_ROWS_PER_SPAN = 2048
_SPANS_PER_EXPORT = 16
_PAUSE_S = 0.001
_FLUSHES_PER_METRICS = 5
_MAX_METRIC_FAILURES = 3
_LAST_WORDS_S = 0.5
_RECONNECT: Any = (  # the exporter's own annotation is too narrow
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
)
_EXPORTER_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
)


class FlushThread(threading.Thread):
    """Exports one process's records every ``flush_interval_s`` seconds."""

    def __init__(self, hook: Hook) -> None:
        super().__init__(name="stratoscope-flush", daemon=True)
        self._hook = hook
        self._stop_event = threading.Event()
        self._started_ns = self._last_ns = time.monotonic_ns()
        self._flushes = self._metric_failures = 0
        self._quiet_flushes = 2
        self._losing = False
        self._exporter: SpanExporter | None = None  # until prepared
        self._metric_exporter: MetricExporter | None = None

    def run(self) -> None:
        """Flush until stopped, then once more."""
        try:
            self._prepare()
        except Exception as error:
            self._hook.give_up(error)
            return
        while not self._stop_event.wait(self._hook.settings.flush_interval_s):
            self._guarded_flush()
        for collect in self._hook.collectors:
            try:
                collect()
            except Exception as error:
                self._hook.patcher.fault("flush.collect", error)
        self._guarded_flush()
        try:
            self._export_metrics(self._last_ns)
            self._shutdown_exporters()
        except Exception as error:
            self._hook.patcher.fault("flush.end", error)

    def _prepare(self) -> None:
        # Here and not in the constructor: the thread that records first is one of vLLM's.
        settings = self._hook.settings
        self._exporter = span_exporter(settings)
        self._metric_exporter = metric_exporter(settings.protocol) if settings.metrics else None
        offset_ns = wall_minus_monotonic_ns()
        version = package_version()
        self.resource = build_resource(self._hook.process_uid, offset_ns, version)
        self._builder = SpanBuilder(self.resource, InstrumentationScope(sc.SCOPE_NAME, version), offset_ns)
        ident = threading.get_ident()
        for name in _EXPORTER_LOGGERS:
            # The exporter's own complaints would fill vLLM's log; ours says it once instead.
            logging.getLogger(name).addFilter(lambda record: record.thread != ident)
        for warning in self._hook.settings.warnings:
            _logger.warning("stratoscope: %s", warning)
        self._announce()

    def stop(self, timeout_s: float) -> None:
        """Ask for the last flush and wait for it up to ``timeout_s`` seconds."""
        self._stop_event.set()
        self.join(timeout_s)
        if self.is_alive():
            self._shutdown_exporters()  # ends their own retries, which would outlast the process
            self.join(_LAST_WORDS_S)  # for the thread to count and to say what was lost

    def _shutdown_exporters(self) -> None:
        for exporter in (self._exporter, self._metric_exporter):
            if exporter is not None:
                exporter.shutdown()

    def _announce(self) -> None:
        missing = sorted(set(self._hook.account.missing))
        _logger.info(
            "stratoscope %s: recording to %s (%s)%s",
            package_version(), self._hook.settings.endpoint, self._hook.settings.protocol,
            f"; this vLLM has no {', '.join(missing)}: fewer phases" if missing else "",
        )  # fmt: skip

    def _guarded_flush(self) -> None:
        cpu = time.thread_time_ns()
        try:
            self.flush()
        except Exception as error:
            self._hook.patcher.fault("flush", error)
        self._hook.account.flush_cpu_ns += time.thread_time_ns() - cpu

    def flush(self) -> None:
        """Export everything recorded until now."""
        hook, watermark_ns = self._hook, time.monotonic_ns()
        for expand in list(hook.expanders):
            expand()
        spans = self._requests()
        active = bool(spans or hook.open)
        for window in list(hook.windows):
            active = self._window(window, watermark_ns, spans) or active
        self._open_requests(watermark_ns, spans)
        # Two quiet flushes more, so that the watermark passes the end of the last request.
        self._quiet_flushes = 2 if active else self._quiet_flushes - 1
        if self._quiet_flushes >= 0 or self._losing:  # while losing: to find out when that ends
            self._export(spans)
        hook.account.loop_lag_max_ns = 0
        self._last_ns = watermark_ns
        self._flushes += 1
        if self._flushes % _FLUSHES_PER_METRICS == 0 and self._quiet_flushes >= 0:
            self._export_metrics(watermark_ns)

    def _export_metrics(self, now_ns: int) -> None:
        """GPU samples and the hook's account; not while nobody answers: one blocked export is enough."""
        if self._metric_exporter is None or self._losing:
            return
        samples = [sample for sampler in self._hook.samplers for sample in sampler.drain()]
        roles = sorted({str(window.attributes[sc.ROLE]) for window in self._hook.windows})
        samples += account_samples(self._hook.account, {sc.ROLE: ",".join(roles)}, now_ns)
        data = build(self.resource, samples, self._started_ns, now_ns)
        if self._metric_exporter.export(data) is MetricExportResult.SUCCESS:
            self._metric_failures = 0
            return
        # A collector with a pipeline for traces only refuses metrics for good.
        self._metric_failures += 1
        if self._metric_failures >= _MAX_METRIC_FAILURES:
            self._metric_exporter.shutdown()
            self._metric_exporter = None
            for sampler in self._hook.samplers:
                sampler.stop(0.0)
            _logger.info("stratoscope: %s takes no metrics: sending none", self._hook.settings.endpoint)

    def _requests(self) -> list[ReadableSpan]:
        hook, builder, spans = self._hook, self._builder, []
        for _ in range(len(hook.finished)):
            kind, record = hook.finished.popleft()
            try:
                if kind == sc.Record.SERVER:
                    spans.append(builder.server(record, hook.model_name))
                elif kind == sc.Record.ENGINE:
                    spans.append(builder.engine(*record))
                else:
                    spans.append(builder.worker(*record))
            except Exception as error:
                hook.account.dropped += 1
                hook.patcher.fault(f"flush.{kind}", error)
            if len(spans) >= _SPANS_PER_EXPORT:
                self._export(spans)
                spans = []
                time.sleep(_PAUSE_S)
        return spans

    def _window(self, window: Window, watermark_ns: int, spans: list[ReadableSpan]) -> bool:
        account = self._hook.account
        account.dropped += window.ring.dropped
        window.ring.dropped = 0
        pending = window.pending_since_ns
        mark_ns = min(watermark_ns, pending) if pending else watermark_ns
        left = any_rows = len(window.ring)  # all that the watermark promises; later rows wait
        while True:
            rows = window.ring.drain(min(left, _ROWS_PER_SPAN))
            left -= _ROWS_PER_SPAN
            spans.append(
                self._builder.window(
                    window.record, window.columns, rows, self._last_ns, mark_ns, window.attributes, account
                )
            )
            if left <= 0:
                return bool(any_rows)

    def _open_requests(self, watermark_ns: int, spans: list[ReadableSpan]) -> None:
        rows = bytearray()
        for record in list(self._hook.open.values()):
            if record.arrival_ns < self._last_ns:
                trace = record.context.trace_id
                high, low = trace >> 64, trace & (1 << 64) - 1
                rows += struct.pack("<QQQq", high, low, record.span_id, record.arrival_ns)
        if rows:
            spans.append(
                self._builder.window(
                    sc.Record.OPEN, sc.OPEN_COLUMNS, bytes(rows), self._last_ns, watermark_ns,
                    {sc.ROLE: "api_server"}, self._hook.account,
                )
            )  # fmt: skip

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        assert self._exporter is not None  # run() prepares before it flushes
        for start in range(0, len(spans), _SPANS_PER_EXPORT):
            batch = spans[start : start + _SPANS_PER_EXPORT]
            if self._exporter.export(batch) is SpanExportResult.SUCCESS:
                self._delivered()
            else:
                self._lost(batch)

    def _delivered(self) -> None:
        if self._losing:
            self._losing = False
            _logger.warning(
                "stratoscope: %s answers again; %d records were dropped",
                self._hook.settings.endpoint, self._hook.account.dropped,
            )  # fmt: skip

    def _lost(self, batch: Sequence[ReadableSpan]) -> None:
        for span in batch:
            attributes = span.attributes or {}
            rows, columns = attributes.get(sc.ROWS, b""), attributes.get(sc.COLUMNS, ())
            count = len(rows) // (8 * len(columns)) if isinstance(rows, bytes) and columns else 1  # type: ignore[arg-type]
            self._hook.account.dropped += count
        if not self._losing:
            self._losing = True
            _logger.warning(
                "stratoscope: %s takes no telemetry: dropping it until that changes; vLLM is not affected",
                self._hook.settings.endpoint,
            )


def package_version() -> str:
    """Version of the installed distribution."""
    try:
        return importlib.metadata.version("stratoscope")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def span_exporter(settings: Settings) -> SpanExporter:
    """The standard OTLP exporter for the protocol; it reads all other OTEL_EXPORTER_OTLP_*."""
    if settings.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        try:
            # gRPC would wait up to two minutes between attempts: an agent that is back is found sooner.
            return GrpcExporter(channel_options=_RECONNECT)
        except TypeError:  # an exporter from before channel_options
            return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


def build_resource(process_uid: str, wall_offset_ns: int, version: str) -> Resource:
    """Resource of this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    import os
    import socket

    attributes: dict[str, Any] = {
        sc.PROCESS_UID: process_uid,
        sc.CLOCK_DOMAIN: clock_domain(),
        sc.WALL_OFFSET_NS: wall_offset_ns,
        sc.HOOK_VERSION: version,
        sc.VLLM_VERSION: _module_version("vllm"),
        sc.TORCH_VERSION: _module_version("torch"),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "process.runtime.version": sys.version.split()[0],
        sc.SERVICE_INSTANCE_ID: os.environ.get("STRATOSCOPE_INSTANCE_ID", process_uid),
    }
    resource = Resource(attributes).merge(Resource.create())
    if str(resource.attributes.get(sc.SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({sc.SERVICE_NAME: "vllm"}))
    return resource


def _module_version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", "unknown"))
