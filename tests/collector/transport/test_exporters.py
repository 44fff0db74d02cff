"""Exporters against real servers: our own receiver where it will do, small misbehaving ones elsewhere."""

from __future__ import annotations

import http.server
import json
import struct
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from stratoscope.collector.component import Component, Context, Refused, Signal, StartError
from stratoscope.collector.config_schema import read
from stratoscope.collector.exporters import file, otlp
from stratoscope.collector.otlp import SERVICE, decode_protobuf
from stratoscope.collector.otlp_json import decode_json, encode_json
from stratoscope.collector.receivers.otlp_grpc import abort
from stratoscope.collector.telemetry import Telemetry

FAST_RETRY = {"initial_interval": "10ms", "max_interval": "20ms"}


class Exporter:
    """An exporter built from configuration, with its own telemetry."""

    def __init__(self, factory: Any, **settings: Any) -> None:
        self.telemetry = Telemetry()
        problems: list[str] = []
        config = read(factory.config, settings, "exporters.x", problems)
        assert not problems
        self.part = factory.build(
            name="x", config=config, context=Context(self.telemetry, self.telemetry.registry)
        )
        assert isinstance(self.part, Component)

    def value(self, name: str) -> float:
        return self.telemetry.value(name, exporter="x")

    def __enter__(self) -> Exporter:
        self.part.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.part.shutdown(5.0)


def exporter(transport: str, port: int, **settings: Any) -> Exporter:
    if transport == "grpc":
        endpoint = {"endpoint": f"127.0.0.1:{port}", "tls": {"insecure": True}}
        return Exporter(otlp.grpc_factory, **endpoint, **settings)
    return Exporter(otlp.http_factory, endpoint=f"http://127.0.0.1:{port}", **settings)


class Backend:
    """Answers one failure after another, then success; gRPC and HTTP."""

    def __init__(self, failures: list[Any]) -> None:
        self.failures, self.received, self.headers = failures, [], []
        lock = threading.Lock()
        backend = self

        def take(raw: bytes, headers: dict[str, str]) -> Any:
            with lock:
                backend.received.append(raw)
                backend.headers.append(headers)
                return backend.failures.pop(0) if backend.failures else None

        def export(raw: bytes, context: grpc.ServicerContext) -> bytes:
            failure = take(raw, dict(context.invocation_metadata()))
            if failure is not None:
                abort(context, failure[0], "not now", failure[1])
            return b""

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                failure = take(raw, {k.lower(): v for k, v in self.headers.items()})
                self.send_response(failure[0] if failure else 200)
                if failure and failure[1] is not None:
                    self.send_header("Retry-After", str(failure[1]))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.grpc = grpc.server(futures.ThreadPoolExecutor(4))
        method = grpc.unary_unary_rpc_method_handler(export)
        services = [grpc.method_handlers_generic_handler(s, {"Export": method}) for s in SERVICE.values()]
        self.grpc.add_generic_rpc_handlers(tuple(services))
        self.grpc_port = self.grpc.add_insecure_port("127.0.0.1:0")
        self.grpc.start()
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http_port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def port(self, transport: str) -> int:
        return self.grpc_port if transport == "grpc" else self.http_port

    def close(self) -> None:
        self.grpc.stop(None)
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def backend() -> Iterator[Backend]:
    server = Backend([])
    yield server
    server.close()


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("signal", list(Signal))
def test_bytes_arrive_untouched(kit: Any, transport: str, compression: str, signal: Signal) -> None:
    sink = kit.Collected()
    batch = kit.batch(signal)
    with (
        kit.receiver(sink) as receiver,
        exporter(transport, receiver.ports[transport == "http"], compression=compression) as sender,
    ):
        sender.part.consume(batch)
        kit.wait_for(lambda: sink.batches)
    assert [(b.signal, b.raw) for b in sink.batches] == [(signal, batch.raw)]
    item = {"traces": "spans", "metrics": "metric_points", "logs": "log_records"}[signal]
    assert sender.value(f"exporter_sent_{item}_total") == 3


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_headers_are_sent(kit: Any, backend: Backend, transport: str) -> None:
    with exporter(transport, backend.port(transport), headers={"x-token": "abc"}) as sender:
        sender.part.consume(kit.batch())
    assert backend.headers[0]["x-token"] == "abc"


UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("transport", "failures"),
    [
        ("grpc", [(UNAVAILABLE, None), (grpc.StatusCode.ABORTED, None)]),
        ("grpc", [(EXHAUSTED, 0.01)]),
        ("http", [(503, 0), (429, None), (502, None), (504, None)]),
    ],
)
def test_what_may_pass_is_retried_until_it_does(
    kit: Any, backend: Backend, transport: str, failures: list[Any]
) -> None:
    backend.failures = list(failures)
    batch = kit.batch()
    with exporter(transport, backend.port(transport), retry_on_failure=FAST_RETRY) as sender:
        sender.part.consume(batch)
        kit.wait_for(lambda: sender.value("exporter_sent_spans_total") == 3)
    assert backend.received == [batch.raw] * (len(failures) + 1)
    assert sender.value("exporter_retries_total") == len(failures)
    assert sender.value("exporter_send_failed_spans_total") == 0


@pytest.mark.parametrize(
    ("transport", "failure"),
    [
        ("grpc", (grpc.StatusCode.INVALID_ARGUMENT, None)),
        ("grpc", (EXHAUSTED, None)),
        ("http", (400, None)),
        ("http", (500, None)),
        ("http", (302, None)),
    ],
)
def test_what_will_not_pass_is_dropped_and_counted(
    kit: Any, backend: Backend, transport: str, failure: Any
) -> None:
    backend.failures = [failure]
    with exporter(transport, backend.port(transport), retry_on_failure=FAST_RETRY) as sender:
        sender.part.consume(kit.batch())
        kit.wait_for(lambda: sender.value("exporter_send_failed_spans_total") == 3)
    assert len(backend.received) == 1


@pytest.mark.parametrize(("transport", "failure"), [("grpc", (UNAVAILABLE, 3600.0)), ("http", (503, 3600))])
def test_the_server_s_wait_is_respected_and_can_be_too_long(
    kit: Any, backend: Backend, transport: str, failure: Any
) -> None:
    backend.failures = [failure]
    with exporter(transport, backend.port(transport), retry_on_failure=FAST_RETRY) as sender:
        sender.part.consume(kit.batch())  # an hour is beyond max_elapsed_time
        kit.wait_for(lambda: sender.value("exporter_send_failed_spans_total") == 3)
    assert len(backend.received) == 1


def test_without_retries_the_first_failure_is_the_last(kit: Any, backend: Backend) -> None:
    backend.failures = [(503, None)]
    with exporter("http", backend.http_port, retry_on_failure={"enabled": False}) as sender:
        sender.part.consume(kit.batch())
        kit.wait_for(lambda: sender.value("exporter_send_failed_spans_total") == 3)
    assert len(backend.received) == 1


@pytest.mark.parametrize("sizer", ["requests", "items", "bytes"])
def test_a_full_queue_refuses(kit: Any, sizer: str) -> None:
    batch = kit.batch()
    two = {"requests": 2, "items": 6, "bytes": 2 * len(batch.raw)}[sizer]
    sender = exporter(
        "grpc", 1, sending_queue={"queue_size": two, "sizer": sizer}
    )  # not started: nothing drains
    sender.part.consume(batch)
    sender.part.consume(batch)
    with pytest.raises(Refused, match="queue of exporter x is full") as caught:
        sender.part.consume(batch)
    assert caught.value.retryable
    assert sender.value("exporter_enqueue_failed_spans_total") == 3
    assert sender.value("exporter_queue_size") == two


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_shutdown_flushes_the_queue(kit: Any, backend: Backend, transport: str) -> None:
    sender = exporter(transport, backend.port(transport), sending_queue={"num_consumers": 1})
    batches = [kit.batch() for _ in range(20)]
    for batch in batches:
        sender.part.consume(batch)
    with sender:
        pass
    assert backend.received == [batch.raw for batch in batches]


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_shutdown_ends_in_time_without_a_server_and_counts_the_loss(kit: Any, transport: str) -> None:
    with exporter(transport, 1) as sender:  # nothing listens on port 1; the first wait would be 5 s
        for _ in range(3):
            sender.part.consume(kit.batch())
    assert sender.value("exporter_send_failed_spans_total") == 9
    assert sender.value("exporter_sent_spans_total") == 0


def test_without_a_queue_the_caller_s_thread_sends(kit: Any, backend: Backend) -> None:
    with exporter("grpc", backend.grpc_port, sending_queue={"enabled": False}) as sender:
        sender.part.consume(kit.batch())
        assert len(backend.received) == 1


@pytest.mark.parametrize("factory", [otlp.grpc_factory, otlp.http_factory])
def test_unreadable_certificates_stop_the_start(factory: Any) -> None:
    sender = Exporter(factory, endpoint="https://127.0.0.1:1", tls={"ca_file": "/nowhere/ca.pem"})
    with pytest.raises(StartError, match=r"exporters\.x\.tls\.ca_file: cannot read '/nowhere/ca\.pem'"):
        sender.part.start()


def test_a_partial_success_is_counted(kit: Any) -> None:
    request = kit.trace_request(2)
    request.resource_spans[0].scope_spans[0].spans[0].trace_id = b"bad"
    batch = kit.batch()
    batch.raw = request.SerializeToString()
    with kit.receiver(kit.Collected()) as receiver, exporter("grpc", receiver.ports[0]) as sender:
        sender.part.consume(batch)
        kit.wait_for(lambda: sender.value("exporter_rejected_spans_total") == 1)


@pytest.mark.parametrize("signal", list(Signal))
def test_the_json_file_is_otlp_json_lines(kit: Any, tmp_path: Path, signal: Signal) -> None:
    path, batches = tmp_path / "out.json", [kit.batch(signal), kit.batch(signal)]
    with Exporter(file.factory, path=str(path)) as writer:
        for batch in batches:
            writer.part.consume(batch)
    lines = path.read_bytes().splitlines()
    assert [decode_json(signal, line).batch.message for line in lines] == [b.message for b in batches]
    if signal is Signal.TRACES:
        span = json.loads(lines[0])["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
        expected = batches[0].message.resource_spans[0].scope_spans[0].spans[0]
        assert (span["traceId"], span["spanId"]) == (expected.trace_id.hex(), expected.span_id.hex())
        assert span["startTimeUnixNano"] == str(10**18)


def test_the_proto_file_is_length_prefixed_raw_bytes(kit: Any, tmp_path: Path) -> None:
    path, batches = tmp_path / "out.bin", [kit.batch(), kit.batch(n=1)]
    with Exporter(file.factory, path=str(path), format="proto") as writer:
        for batch in batches:
            writer.part.consume(batch)
    data, found = path.read_bytes(), []
    while data:
        (size,) = struct.unpack(">I", data[:4])
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    assert found == [batch.raw for batch in batches]


def test_rotation_bounds_the_disk(kit: Any, tmp_path: Path) -> None:
    request = kit.trace_request(1)
    request.resource_spans[0].scope_spans[0].spans[0].name = "x" * 600_000
    batch = decode_protobuf(Signal.TRACES, request.SerializeToString()).batch
    path, rotation = tmp_path / "out.json", {"max_megabytes": 1, "max_backups": 2}
    with Exporter(file.factory, path=str(path), rotation=rotation) as writer:
        for _ in range(5):
            writer.part.consume(batch)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "out.json.1", "out.json.2"]
    assert all(len(p.read_bytes().splitlines()) == 1 for p in tmp_path.iterdir())


def test_append_keeps_what_is_there(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for append in (False, True, False):
        with Exporter(file.factory, path=str(path), append=append) as writer:
            writer.part.consume(kit.batch())
        assert len(path.read_bytes().splitlines()) == (2 if append else 1)


def test_a_path_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    writer = Exporter(file.factory, path=str(tmp_path / "none" / "out.json"))
    with pytest.raises(StartError, match=r"exporters\.x\.path: cannot write .*No such file"):
        writer.part.start()


def test_json_lines_are_readable_by_protobuf_once_ids_are_base64(kit: Any) -> None:
    """The encoder differs from protobuf's own mapping in ids and enums only."""
    message = kit.batch(Signal.METRICS).message
    assert json.loads(encode_json(message)) == json_format.MessageToDict(message, use_integers_for_enums=True)
