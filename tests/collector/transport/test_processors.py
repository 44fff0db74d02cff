"""The batch processor and the memory limiter."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratoscope.collector.component import Batch, Context, Refused, Signal
from stratoscope.collector.otlp import REQUEST, count_items, decode_protobuf
from stratoscope.collector.processors import batch as batch_module
from stratoscope.collector.processors import memory_limiter
from stratoscope.collector.processors.batch import BatchProcessor, merge
from stratoscope.collector.processors.split import split
from stratoscope.collector.telemetry import Telemetry

LONG_S = 3600.0


def context() -> Context:
    telemetry = Telemetry()
    return Context(telemetry, telemetry.registry)


def processor(sink: Any, own: Context, **settings: Any) -> BatchProcessor:
    part = batch_module.build("batch", batch_module.Config(**settings), sink, own, Signal.TRACES)
    part.start()
    return part


def names(batch: Batch) -> list[str]:
    message: Any = batch.message
    return [s.name for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]


def test_a_full_batch_goes_at_once_and_is_the_concatenation(kit: Any) -> None:
    sink, parts = kit.Collected(), [kit.batch() for _ in range(4)]
    part = processor(sink, context(), timeout=LONG_S, send_batch_size=12)
    for batch in parts:
        part.consume(batch)
    kit.wait_for(lambda: sink.batches)
    part.shutdown(5.0)
    (merged,) = sink.batches
    assert merged.raw == b"".join(batch.raw for batch in parts)
    assert merged.items == 12 == count_items(Signal.TRACES, merged.message)
    assert names(merged) == [name for batch in parts for name in names(batch)]


def test_the_timeout_sends_what_is_there(kit: Any) -> None:
    sink = kit.Collected()
    part = processor(sink, context(), timeout=0.01)
    part.consume(kit.batch())
    kit.wait_for(lambda: sink.batches)
    part.shutdown(5.0)
    assert sink.batches[0].items == 3


def test_shutdown_sends_what_is_pending_and_then_refuses(kit: Any) -> None:
    sink = kit.Collected()
    part = processor(sink, context(), timeout=LONG_S)
    part.consume(kit.batch())
    part.shutdown(5.0)
    assert [batch.items for batch in sink.batches] == [3]
    with pytest.raises(Refused) as caught:
        part.consume(kit.batch())
    assert caught.value.retryable


def test_maximum_size_divides_and_loses_nothing(kit: Any) -> None:
    sink, whole = kit.Collected(), kit.batch(n=25)
    part = processor(sink, context(), timeout=LONG_S, send_batch_size=10, send_batch_max_size=10)
    part.consume(whole)
    part.shutdown(5.0)
    assert [batch.items for batch in sink.batches] == [10, 10, 5]
    assert [name for batch in sink.batches for name in names(batch)] == names(whole)


def test_maximum_bytes_ends_a_merge(kit: Any) -> None:
    sink, parts = kit.Collected(), [kit.batch() for _ in range(5)]
    limit = len(parts[0].raw) * 2
    part = processor(sink, context(), timeout=LONG_S, send_batch_max_bytes=limit)
    for batch in parts:
        part.consume(batch)
    part.shutdown(5.0)
    assert all(len(batch.raw) <= limit for batch in sink.batches)
    assert b"".join(batch.raw for batch in sink.batches) == b"".join(batch.raw for batch in parts)


@pytest.mark.parametrize("failure", [Refused("full", retryable=True), ZeroDivisionError("a bug")])
def test_what_nobody_takes_is_counted_and_the_thread_lives(kit: Any, failure: Exception) -> None:
    sink, own = kit.Collected(), context()
    sink.refusal = failure
    part = processor(sink, own, timeout=0.0)
    part.consume(kit.batch())
    kit.wait_for(lambda: own.telemetry.value("processor_dropped_spans_total", processor="batch") == 3)
    sink.refusal = None
    part.consume(kit.batch())
    part.shutdown(5.0)
    assert [batch.items for batch in sink.batches] == [3]


def test_a_slow_exporter_makes_it_refuse_rather_than_grow(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MAX_PENDING_BYTES", 1000)
    entered, release = threading.Event(), threading.Event()

    class Slow:
        def consume(self, batch: Batch) -> None:
            entered.set()
            release.wait(20)

    part = processor(Slow(), context(), timeout=0.0)
    part.consume(kit.batch())
    assert entered.wait(20)
    with pytest.raises(Refused, match="too slow") as caught:
        for _ in range(100):
            part.consume(kit.batch())
    assert caught.value.retryable
    release.set()
    part.shutdown(5.0)


@given(
    sizes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=4),
    limit=st.integers(1, 9),
    signal=st.sampled_from(Signal),
)
def test_splitting_keeps_every_item_its_order_and_its_scope(
    sizes: list[list[int]], limit: int, signal: Signal
) -> None:
    levels = {
        Signal.TRACES: ("resource_spans", "scope_spans", "spans"),
        Signal.METRICS: ("resource_metrics", "scope_metrics", "metrics"),
        Signal.LOGS: ("resource_logs", "scope_logs", "log_records"),
    }[signal]
    request: Any = REQUEST[signal]()
    for r, scopes in enumerate(sizes):
        resource = getattr(request, levels[0]).add(schema_url=f"resource-{r}")
        for s, size in enumerate(scopes):
            scope = getattr(resource, levels[1]).add(schema_url=f"scope-{s}")
            for index in range(size):
                leaf = getattr(scope, levels[2]).add()
                if signal is Signal.METRICS:
                    leaf.gauge.data_points.add(as_int=index)
                elif signal is Signal.LOGS:
                    leaf.severity_number, leaf.time_unix_nano = 9, index
                else:
                    leaf.trace_id, leaf.span_id, leaf.name = os.urandom(16), os.urandom(8), str(index)
    batch = decode_protobuf(signal, request.SerializeToString()).batch

    def leaves(message: Any) -> list[tuple[str, str, bytes]]:
        return [
            (resource.schema_url, scope.schema_url, leaf.SerializeToString())
            for resource in getattr(message, levels[0])
            for scope in getattr(resource, levels[1])
            for leaf in getattr(scope, levels[2])
        ]

    pieces = list(split(batch, limit))
    assert [leaf for piece in pieces for leaf in leaves(piece.message)] == leaves(batch.message)
    assert all(0 < piece.items <= limit for piece in pieces)
    assert all(piece.items == count_items(signal, piece.message) for piece in pieces)
    if pieces:
        assert leaves(merge(pieces).message) == leaves(batch.message)


def test_the_memory_limiter_refuses_above_the_soft_limit_and_recovers(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, own = kit.Collected(), context()
    settings = memory_limiter.Config(limit_mib=1000, spike_limit_mib=200, check_interval=0.0)
    part = memory_limiter.build("memory_limiter", settings, sink, own, Signal.TRACES)
    resident_mib = [799]
    monkeypatch.setattr(memory_limiter, "resident_bytes", lambda: resident_mib[0] << 20)
    part.consume(kit.batch())
    resident_mib[0] = 800
    with pytest.raises(Refused, match="uses 800 MiB of memory, its limit is 800 MiB") as caught:
        part.consume(kit.batch())
    assert caught.value.retryable
    resident_mib[0] = 700
    part.consume(kit.batch())
    assert len(sink.batches) == 2
    assert own.telemetry.value("processor_memory_limiter_refusals_total") == 1


def test_resident_memory_is_measured_for_real() -> None:
    before = memory_limiter.resident_bytes()
    block = bytearray(os.urandom(1 << 20) * 64)
    after = memory_limiter.resident_bytes()
    assert before is not None
    assert after is not None
    assert len(block) * 0.9 <= after - before <= len(block) * 1.5
