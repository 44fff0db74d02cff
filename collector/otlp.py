"""Turns bytes from the network into a :class:`Batch`, or says what is wrong with them.

    PayloadError
     +- InvalidPayload       not OTLP: answer 400 / INVALID_ARGUMENT
     +- PayloadTooLarge      beyond a limit: answer 413 / RESOURCE_EXHAUSTED
     +- UnsupportedPayload   a type or encoding that is not spoken here: answer 415

Nothing else comes out of the functions here, whatever goes in; time and memory are bounded by the
size of the input and the limits. Spans that break OTLP's own rules (ids of a wrong length or all
zero, an end far before its start) are taken out and reported, their neighbours are kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from stratoscope.collector.component import Batch, Signal
from stratoscope.collector.wire_error import find_wire_error

REQUEST: Final[dict[Signal, type[Message]]] = {
    Signal.TRACES: ExportTraceServiceRequest,
    Signal.METRICS: ExportMetricsServiceRequest,
    Signal.LOGS: ExportLogsServiceRequest,
}
RESPONSE: Final[dict[Signal, type[Message]]] = {
    Signal.TRACES: ExportTraceServiceResponse,
    Signal.METRICS: ExportMetricsServiceResponse,
    Signal.LOGS: ExportLogsServiceResponse,
}
SERVICE: Final = {
    Signal.TRACES: "opentelemetry.proto.collector.trace.v1.TraceService",
    Signal.METRICS: "opentelemetry.proto.collector.metrics.v1.MetricsService",
    Signal.LOGS: "opentelemetry.proto.collector.logs.v1.LogsService",
}
REJECTED_FIELD: Final = {
    Signal.TRACES: "rejected_spans",
    Signal.METRICS: "rejected_data_points",
    Signal.LOGS: "rejected_log_records",
}

MAX_BACKWARDS_NS: Final = 3600 * 10**9  # a clock step may put an end before its start; not by an hour
_ZERO_TRACE_ID: Final = bytes(16)
_ZERO_SPAN_ID: Final = bytes(8)
_ZLIB_WINDOW: Final = {"gzip": 31, "deflate": 15}


class PayloadError(Exception):
    """A payload cannot be used; ``reason`` is a sentence for its sender."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class InvalidPayload(PayloadError):
    """Not a valid OTLP request. ``offset`` is the byte at which decoding fails, where known."""

    def __init__(self, reason: str, offset: int | None = None) -> None:
        super().__init__(reason if offset is None else f"{reason} (at byte {offset})")
        self.offset = offset


class PayloadTooLarge(PayloadError):
    """Larger than a configured limit, as sent or once decompressed."""


class UnsupportedPayload(PayloadError):
    """A content type or content encoding that is not supported."""


@dataclass(slots=True)
class Decoded:
    """What a payload held: the good part of it, and an account of what was taken out."""

    batch: Batch
    rejected: int = 0  # items
    reason: str = ""  # why, for the sender; empty when none were rejected


def decode_protobuf(signal: Signal, raw: bytes) -> Decoded:
    """Parse a binary OTLP export request. Raises :class:`InvalidPayload`."""
    message = REQUEST[signal]()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        name = message.DESCRIPTOR.name
        error = find_wire_error(message.DESCRIPTOR, raw)
        if error is None:
            raise InvalidPayload(f"body is not a valid {name}") from None
        raise InvalidPayload(f"body is not a valid {name}: {error.reason}", error.offset) from None
    if signal is not Signal.TRACES:
        return Decoded(Batch(signal, message, raw, count_items(signal, message)))
    return _drop_invalid_spans(message, raw)


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Undo a ``Content-Encoding``. Raises :class:`PayloadError`; never makes more than ``max_bytes``."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in _ZLIB_WINDOW:
        raise UnsupportedPayload(
            f"Content-Encoding {encoding[:40]!r} is not supported; use gzip, deflate or identity"
        )
    parts: list[bytes] = []
    size, rest = 0, body
    while True:  # a gzip body may have several members
        stream = zlib.decompressobj(_ZLIB_WINDOW[encoding])
        try:
            part = stream.decompress(rest, max_bytes - size + 1)
        except zlib.error as error:
            raise InvalidPayload(f"body is not valid {encoding}: {error}") from None
        size += len(part)
        if size > max_bytes:
            raise PayloadTooLarge(f"body is larger than {max_bytes} bytes once decompressed")
        if part:
            parts.append(part)
        if not stream.eof:
            raise InvalidPayload(f"body is not valid {encoding}: it ends early", len(body))
        if not stream.unused_data or encoding != "gzip":
            return b"".join(parts)
        if len(stream.unused_data) >= len(rest) or len(parts) > 1000:
            raise InvalidPayload(f"body is not valid {encoding}: too many members")
        rest = stream.unused_data


def count_items(signal: Signal, message: Any) -> int:
    """Spans, data points or log records in a request."""
    if signal is Signal.TRACES:
        return sum(len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans)
    if signal is Signal.LOGS:
        return sum(
            len(scope.log_records) for resource in message.resource_logs for scope in resource.scope_logs
        )
    return sum(
        data_points(metric)
        for resource in message.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )


def data_points(metric: Any) -> int:
    """Data points of one metric."""
    kind = metric.WhichOneof("data")
    return len(getattr(metric, kind).data_points) if kind else 0


def partial_success(signal: Signal, decoded: Decoded) -> Any:
    """The export response: empty, or saying how many items were rejected and why."""
    response: Any = RESPONSE[signal]()
    if decoded.rejected:
        setattr(response.partial_success, REJECTED_FIELD[signal], decoded.rejected)
        response.partial_success.error_message = decoded.reason
    return response


def _span_problem(span: Any) -> str | None:
    trace_id, span_id = span.trace_id, span.span_id
    if len(trace_id) != 16 or trace_id == _ZERO_TRACE_ID:
        return "trace_id must be 16 bytes, not all zero"
    if len(span_id) != 8 or span_id == _ZERO_SPAN_ID:
        return "span_id must be 8 bytes, not all zero"
    if len(span.parent_span_id) not in (0, 8):
        return "parent_span_id must be 8 bytes or empty"
    end_ns = span.end_time_unix_nano
    if end_ns and span.start_time_unix_nano - end_ns > MAX_BACKWARDS_NS:
        return "end_time_unix_nano is more than an hour before start_time_unix_nano"
    return None


def _bad_spans(message: Any) -> Iterator[tuple[Any, int, str]]:
    for r, resource in enumerate(message.resource_spans):
        for s, scope in enumerate(resource.scope_spans):
            # The condition repeats _span_problem in one expression: it runs for every span received.
            suspects = [
                (index, span)
                for index, span in enumerate(scope.spans)
                if len(trace_id := span.trace_id) != 16
                or trace_id == _ZERO_TRACE_ID
                or len(span_id := span.span_id) != 8
                or span_id == _ZERO_SPAN_ID
                or span.end_time_unix_nano < span.start_time_unix_nano
                or ((parent := span.parent_span_id) and len(parent) != 8)
            ]
            for index, span in suspects:
                if problem := _span_problem(span):
                    yield scope, index, f"resource_spans[{r}].scope_spans[{s}].spans[{index}]: {problem}"


def _drop_invalid_spans(message: Any, raw: bytes) -> Decoded:
    bad = list(_bad_spans(message))
    if bad:
        # One rebuild per scope: deleting from the middle of a repeated field is quadratic.
        by_scope: dict[int, tuple[Any, set[int]]] = {}
        for scope, index, _ in bad:
            by_scope.setdefault(id(scope), (scope, set()))[1].add(index)
        for scope, indexes in by_scope.values():
            kept = [span for index, span in enumerate(scope.spans) if index not in indexes]
            rebuilt = type(scope)()
            rebuilt.CopyFrom(scope)
            del rebuilt.spans[:]
            rebuilt.spans.extend(kept)
            scope.CopyFrom(rebuilt)
        raw = message.SerializeToString()
    reason = bad[0][2] if bad else ""
    if len(bad) > 1:
        reason += f"; and {len(bad) - 1} more"
    return Decoded(Batch(Signal.TRACES, message, raw, count_items(Signal.TRACES, message)), len(bad), reason)
