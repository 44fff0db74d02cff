"""The gRPC receiver, spoken to by a real gRPC client."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from stratoscope.collector.component import Refused, Signal, StartError
from stratoscope.collector.otlp import RESPONSE, SERVICE


def export(port: int, signal: Signal, raw: bytes, compression: Any = None) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{port}", compression=compression) as channel:
        answer = channel.unary_unary(f"/{SERVICE[signal]}/Export")(raw, timeout=20)
        return RESPONSE[signal].FromString(answer)


def failure(port: int, raw: bytes, compression: Any = None) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        export(port, Signal.TRACES, raw, compression)
    return caught.value


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_every_signal_arrives_with_its_bytes_untouched(kit: Any, signal: Signal, compression: Any) -> None:
    sink = kit.Collected()
    raw = kit.requests[signal](3).SerializeToString()
    with kit.receiver(sink) as receiver:
        answer = export(receiver.ports[0], signal, raw, compression)
        item = {"traces": "spans", "metrics": "metric_points", "logs": "log_records"}[signal]
        accepted = receiver.telemetry.value(
            f"receiver_accepted_{item}_total", receiver="otlp", transport="grpc"
        )
    assert not answer.HasField("partial_success")
    assert [(b.signal, b.raw, b.items) for b in sink.batches] == [(signal, raw, 3)]
    assert accepted == 3


def test_invalid_spans_are_rejected_and_their_neighbours_kept(kit: Any) -> None:
    sink = kit.Collected()
    request = kit.trace_request(7)
    spans = request.resource_spans[0].scope_spans[0].spans
    spans[0].trace_id = b"short"
    spans[1].trace_id = bytes(16)
    spans[2].span_id = b""
    spans[3].parent_span_id = b"abc"
    spans[4].end_time_unix_nano = 1
    spans[5].span_id = bytes(8)
    with kit.receiver(sink) as receiver:
        answer = export(receiver.ports[0], Signal.TRACES, request.SerializeToString())
    assert answer.partial_success.rejected_spans == 6
    assert "resource_spans[0].scope_spans[0].spans[0]: trace_id" in answer.partial_success.error_message
    (batch,) = sink.batches
    kept = batch.message.resource_spans[0].scope_spans[0]
    assert [span.name for span in kept.spans] == ["span-6"]
    assert kept.scope.name == "scope"
    assert batch.raw == batch.message.SerializeToString()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\x0a\x7f", "says it has 127 bytes, but 0 are left (at byte 2)"),
        (b"\xff" * 30, "varint is longer than 10 bytes (at byte 0)"),
        (b"\x0a\x05\x1a\x03\xff\xff\xff", "not valid UTF-8 (at byte 4)"),
        (b"not protobuf at all", "not a valid ExportTraceServiceRequest"),
    ],
)
def test_garbage_is_an_invalid_argument_with_the_place(kit: Any, raw: bytes, reason: str) -> None:
    sink = kit.Collected()
    with kit.receiver(sink) as receiver:
        error = failure(receiver.ports[0], raw)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason in error.details()
        export(receiver.ports[0], Signal.TRACES, kit.trace_request().SerializeToString())  # it lives on
    assert len(sink.batches) == 1


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_too_large_is_resource_exhausted_also_once_decompressed(kit: Any, compression: Any) -> None:
    sink = kit.Collected()
    limited = {"grpc": {"endpoint": "127.0.0.1:0", "max_recv_msg_size_mib": 1}}
    with kit.receiver(sink, limited) as receiver:
        error = failure(receiver.ports[0], bytes(2 << 20), compression)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sink.batches == []


def test_a_retryable_refusal_is_unavailable_and_says_when(kit: Any) -> None:
    sink = kit.Collected()
    sink.refusal = Refused("no room", retryable=True, retry_after_s=2.5)
    with kit.receiver(sink) as receiver:
        error = failure(receiver.ports[0], kit.trace_request().SerializeToString())
        refused = receiver.telemetry.value("receiver_refused_spans_total", receiver="otlp", transport="grpc")
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "no room")
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    info = error_details_pb2.RetryInfo()
    assert status_pb2.Status.FromString(details).details[0].Unpack(info)
    assert info.retry_delay.ToMilliseconds() == 2500
    assert refused == 3


@pytest.mark.parametrize("refusal", [Refused("never", retryable=False), ZeroDivisionError("a bug")])
def test_a_final_refusal_and_a_bug_are_internal(kit: Any, refusal: Exception) -> None:
    sink = kit.Collected()
    sink.refusal = refusal
    with kit.receiver(sink) as receiver:
        error = failure(receiver.ports[0], kit.trace_request().SerializeToString())
    assert error.code() is grpc.StatusCode.INTERNAL


def test_a_port_in_use_is_an_error_that_names_key_and_port(kit: Any) -> None:
    with kit.receiver(kit.Collected()) as receiver:
        taken = f"127.0.0.1:{receiver.ports[0]}"
        with (
            pytest.raises(StartError, match=rf"receivers\.otlp\.protocols\.grpc\.endpoint.*{taken}.*in use"),
            kit.receiver(kit.Collected(), {"grpc": {"endpoint": taken}}),
        ):
            pass
