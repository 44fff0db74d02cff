"""Mutated OTLP must give documented errors or a batch: never another exception, never a hang.

Each parser takes ``STRATOSCOPE_FUZZ_N`` mutations (default 100 000) of valid seeds. To run one alone::

    python tests/fuzz/test_otlp_parsers.py traces 1000000
"""

from __future__ import annotations

import gzip
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.collector.component import Signal
from stratoscope.collector.otlp import (
    REQUEST,
    Decoded,
    PayloadError,
    count_items,
    decode_protobuf,
    decompress,
)
from stratoscope.collector.otlp_json import decode_json, encode_json

FUZZ_N = int(os.environ.get("STRATOSCOPE_FUZZ_N", "100000"))
INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff" * 10,
    b"\x0a",
    b"\x80\x80\x80\x80\x08",
    b"[",
    b"{",
    b'"',
)
MAX_INFLATED_BYTES = 1 << 16


def traces() -> Any:
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add(schema_url="https://example.org/schema")
    resource.resource.attributes.add(key="service.name").value.string_value = "vllm"
    scope = resource.scope_spans.add()
    scope.scope.name = "stratoscope"
    for index in range(2):
        span = scope.spans.add(trace_id=bytes(range(1, 17)), span_id=bytes([index + 1] * 8), name="décode")
        span.start_time_unix_nano, span.end_time_unix_nano = 10**18, 10**18 + 5
        span.attributes.add(key="rows").value.bytes_value = bytes(16)
        values = span.attributes.add(key="columns").value.array_value.values
        values.add().string_value = "step"
        values.add().kvlist_value.values.add(key="deep").value.double_value = 1.5
        span.links.add(trace_id=bytes(range(1, 17)), span_id=bytes([9] * 8))
        span.events.add(name="event", time_unix_nano=10**18)
    return request


def metrics() -> Any:
    request = ExportMetricsServiceRequest()
    scope = request.resource_metrics.add().scope_metrics.add()
    scope.metrics.add(name="gauge", unit="By").gauge.data_points.add(as_double=0.5, time_unix_nano=10**18)
    total = scope.metrics.add(name="sum").sum
    total.is_monotonic, total.aggregation_temporality = True, 2
    total.data_points.add(as_int=-3).exemplars.add(trace_id=bytes(range(1, 17)), as_double=2.0)
    histogram = scope.metrics.add(name="histogram").histogram.data_points.add(count=3, sum=1.5)
    histogram.bucket_counts.extend([1, 2])
    histogram.explicit_bounds.append(0.5)
    scope.metrics.add(name="exp").exponential_histogram.data_points.add(
        scale=3
    ).positive.bucket_counts.extend([1, 7])
    return request


def logs() -> Any:
    request = ExportLogsServiceRequest()
    record = (
        request.resource_logs.add().scope_logs.add().log_records.add(severity_number=9, severity_text="INFO")
    )
    record.trace_id, record.span_id, record.time_unix_nano = bytes(range(1, 17)), bytes([1] * 8), 10**18
    record.body.kvlist_value.values.add(key="message").value.string_value = "héllo"
    return request


SEEDS: dict[Signal, Callable[[], Any]] = {Signal.TRACES: traces, Signal.METRICS: metrics, Signal.LOGS: logs}


def mutate(rng: random.Random, seed: bytes) -> bytes:
    """One to three byte-wise changes: set, flip, insert, delete, truncate, repeat, move, splice."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        size = len(data)
        if not size:
            break
        at, other = rng.randrange(size), rng.randrange(size)
        begin, end = min(at, other), max(at, other)
        match rng.choice((0, 0, 0, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7)):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at:at] = rng.choice(INTERESTING) * rng.choice((1, 1, 1, 150))
            case 3:
                del data[begin : min(end, begin + 8)]
            case 4:
                del data[at:]
            case 5:
                data[at:at] = data[begin:end]
            case 6:
                data[begin:end] = data[at : at + 4]
            case _:
                data = data[:at] + bytearray(seed[other:])
    return bytes(data)


def check_batch(decoded: Decoded) -> None:
    """What a batch promises, whatever it was made of."""
    batch = decoded.batch
    reparsed = REQUEST[batch.signal].FromString(batch.raw)
    assert count_items(batch.signal, reparsed) == batch.items
    assert decoded.rejected >= 0
    assert bool(decoded.reason) == bool(decoded.rejected)
    if batch.signal is Signal.TRACES:
        spans = [s for r in reparsed.resource_spans for scope in r.scope_spans for s in scope.spans]
        assert all(len(s.trace_id) == 16 and len(s.span_id) == 8 for s in spans)


def fuzz(parse: Callable[[bytes], object], seed: bytes, n: int, random_seed: int = 0) -> Counter[str]:
    """Feed ``n`` mutations of ``seed`` to ``parse``; counts outcomes, raises anything undocumented."""
    rng = random.Random(random_seed)
    outcomes: Counter[str] = Counter()
    for index in range(n):
        data = mutate(rng, seed)
        try:
            parse(data)
            outcomes["ok"] += 1
        except PayloadError as error:
            assert error.reason
            outcomes[type(error).__name__] += 1
        except BaseException:
            print(f"mutation {index}: {data!r}", file=sys.stderr)
            raise
    return outcomes


def _binary(signal: Signal) -> tuple[Callable[[bytes], object], bytes]:
    return lambda data: check_batch(decode_protobuf(signal, data)), SEEDS[signal]().SerializeToString()


def _json(signal: Signal) -> tuple[Callable[[bytes], object], bytes]:
    return lambda data: check_batch(decode_json(signal, data)), encode_json(SEEDS[signal]()).encode()


def _inflate(encoding: str) -> tuple[Callable[[bytes], object], bytes]:
    def parse(data: bytes) -> None:
        assert len(decompress(data, encoding, MAX_INFLATED_BYTES)) <= MAX_INFLATED_BYTES

    seed = gzip.compress(traces().SerializeToString() * 3, mtime=0)
    return parse, seed


TARGETS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "traces": _binary(Signal.TRACES),
    "metrics": _binary(Signal.METRICS),
    "logs": _binary(Signal.LOGS),
    "json-traces": _json(Signal.TRACES),
    "json-metrics": _json(Signal.METRICS),
    "json-logs": _json(Signal.LOGS),
    "gzip": _inflate("gzip"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_give_a_batch_or_a_documented_error(name: str) -> None:
    parse, seed = TARGETS[name]
    parse(seed)
    outcomes = fuzz(parse, seed, FUZZ_N)
    assert sum(outcomes.values()) == FUZZ_N
    assert outcomes["InvalidPayload"] > FUZZ_N // 100, "the mutations are too tame to test anything"
    parse(seed)  # no mutation left anything behind that spoils a valid request


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "traces"
    began_s = time.perf_counter()
    print(dict(fuzz(*TARGETS[chosen], int(sys.argv[2]) if len(sys.argv) > 2 else FUZZ_N)))
    print(f"{time.perf_counter() - began_s:.1f} s")
