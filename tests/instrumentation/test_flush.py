"""The flush thread against a real OTLP server: what arrives, what is said when nobody listens."""

from __future__ import annotations

import collections
import gzip
import http.server
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.instrumentation import semconv as sc
from stratoscope.instrumentation.hook import Hook
from stratoscope.instrumentation.server_request import ServerRecord
from stratoscope.instrumentation.settings import Settings


class Server(grpc.GenericRpcHandler):
    """An OTLP server that keeps the spans it gets."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[dict[str, Any]] = []
        self.process_uids: set[str] = set()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        def take(raw: bytes, context: Any) -> bytes:
            if details.method.endswith("TraceService/Export"):
                for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                    own = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                    self.process_uids.add(own[sc.PROCESS_UID])
                    for span in (span for scope in resource.scope_spans for span in scope.spans):
                        self.spans.append({pair.key: pair.value for pair in span.attributes})
            return b""

        return grpc.unary_unary_rpc_method_handler(take)

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span[sc.RECORD].string_value == kind]

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.port}")
    yield made
    made.stop()


def make_hook(port: int) -> Hook:
    return Hook(Settings(f"http://127.0.0.1:{port}", "grpc", flush_interval_s=0.05, metrics=False))


def eventually(check: Any, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


def finished_record() -> ServerRecord:
    record = ServerRecord("http", time.monotonic_ns(), None)
    record.response_complete = True
    record.close(time.monotonic_ns(), None)
    return record


def test_rows_requests_and_the_account_arrive(server: Server) -> None:
    hook = make_hook(server.port)
    window = hook.window(sc.Record.OUTPUTS, sc.OUTPUT_COLUMNS, {sc.ROLE: "api_server"})
    for value in range(5000):  # more than one span holds
        window.ring.push(value, 2, 3, 0, 1)
    hook.finish(sc.Record.SERVER, finished_record())
    eventually(lambda: server.records(sc.Record.SERVER))
    tables = server.records(sc.Record.OUTPUTS)
    packed = b"".join(span[sc.ROWS].bytes_value for span in tables)
    assert len(packed) == 5000 * 8 * len(sc.OUTPUT_COLUMNS)
    assert [column.string_value for column in tables[0][sc.COLUMNS].array_value.values] == list(
        sc.OUTPUT_COLUMNS
    )
    assert all(span[sc.WATERMARK].int_value > 0 for span in tables)
    assert sc.HOOK_DROPPED in tables[0]
    hook.shutdown()


def test_a_record_that_cannot_be_sent_is_counted_and_its_neighbours_kept(server: Server) -> None:
    hook = make_hook(server.port)
    hook.window(sc.Record.OUTPUTS, sc.OUTPUT_COLUMNS, {sc.ROLE: "api_server"})
    hook.finish(sc.Record.SERVER, object())
    hook.finish(sc.Record.SERVER, finished_record())
    eventually(lambda: server.records(sc.Record.SERVER))
    assert (hook.account.dropped, hook.account.errors) == (1, 1)
    hook.shutdown()


def test_open_requests_are_told_of(server: Server) -> None:
    hook = make_hook(server.port)
    record = ServerRecord("http", time.monotonic_ns(), None)
    hook.open[record.span_id] = record
    hook.start()
    eventually(lambda: server.records(sc.Record.OPEN))
    row = server.records(sc.Record.OPEN)[0][sc.ROWS].bytes_value
    assert int.from_bytes(row[16:24], "little") == record.span_id
    hook.shutdown()


def test_nobody_listens_then_somebody_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    first = Server()
    port = first.port
    first.stop()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    hook = make_hook(port)
    hook.finish(sc.Record.SERVER, finished_record())
    hook.start()
    eventually(lambda: hook.account.dropped >= 1)
    hook.finish(sc.Record.SERVER, finished_record())
    eventually(lambda: hook.account.dropped >= 2)
    second = Server(port)
    try:
        hook.finish(sc.Record.SERVER, finished_record())
        # gRPC waits up to two minutes between its attempts to connect, less where the port was open before
        eventually(lambda: (hook.finish(sc.Record.SERVER, finished_record()), second.spans)[1], 150.0)
        eventually(lambda: "answers again" in caplog.text)
        assert caplog.text.count("takes no telemetry") == 1
    finally:
        hook.shutdown()
        second.stop()


RECORD = """
import os, sys, time
from stratoscope.instrumentation import hook, semconv as sc, settings
from stratoscope.instrumentation.server_request import ServerRecord
made = hook.get(settings.read())
def record_one():
    record = ServerRecord("http", time.monotonic_ns(), None)
    record.close(time.monotonic_ns(), None)
    made.finish(sc.Record.SERVER, record)
"""
SEND = "record_one(); made.start()\n"
EXPORTING = "while made.finished: time.sleep(0.01)\n"  # the flush thread has it and is trying
# vLLM forks before it serves: there are records, but nothing is being sent yet. (gRPC itself cannot
# be forked while it is in use.)
FORK = """
record_one()
pid = os.fork()
if pid == 0:
    assert not made.finished and not made.windows and made._flush is None
    record_one()
    made.start()
    while made.finished: time.sleep(0.01)
    made.shutdown()
    os._exit(0)
made.start()
while made.finished: time.sleep(0.01)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def run_process(code: str, port: int) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_METRICS_EXPORTER": "none",
        "STRATOSCOPE_FLUSH_INTERVAL_S": "0.05",
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=env, timeout=60, check=False, capture_output=True, text=True
    )


def test_a_process_ends_though_nobody_listens_and_says_so_once() -> None:
    done = run_process(RECORD + SEND + EXPORTING, 9)
    assert done.returncode == 0
    assert done.stderr.count("takes no telemetry") == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr  # no complaint of the exporter's either


def test_what_was_recorded_last_is_sent_at_the_end(server: Server) -> None:
    done = run_process(RECORD + SEND + EXPORTING + "record_one()\n", server.port)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(server.records(sc.Record.SERVER)) == 2


def test_a_forked_child_starts_empty_and_records_for_itself(server: Server) -> None:
    done = run_process(RECORD + FORK, server.port)
    assert done.returncode == 0, done.stderr
    assert len(server.records(sc.Record.SERVER)) == 2
    assert len(server.process_uids) == 2


class HttpServer(http.server.ThreadingHTTPServer):
    """An OTLP/HTTP server that keeps the bodies it gets, by path."""

    def __init__(self) -> None:
        bodies = self.bodies = collections.defaultdict[str, list[bytes]](list)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                unpacked = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                bodies[self.path].append(unpacked)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def http_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    made = HttpServer()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server_port}")
    yield made
    made.shutdown()
    made.server_close()


def test_spans_and_the_account_go_over_http_too(http_server: HttpServer) -> None:
    hook = Hook(Settings("http://127.0.0.1", "http/protobuf", flush_interval_s=0.05))
    hook.window(sc.Record.OUTPUTS, sc.OUTPUT_COLUMNS, {sc.ROLE: "api_server"})
    hook.finish(sc.Record.SERVER, finished_record())
    eventually(lambda: not hook.finished)
    hook.shutdown()
    kinds = set()
    for body in http_server.bodies["/v1/traces"]:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                kinds |= {pair.value.string_value for pair in span.attributes if pair.key == sc.RECORD}
    assert {sc.Record.SERVER, sc.Record.OUTPUTS} <= kinds
    names = set()
    for body in http_server.bodies["/v1/metrics"]:
        for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            names |= {metric.name for scope in measured.scope_metrics for metric in scope.metrics}
    assert {sc.HOOK_DROPPED, sc.HOOK_REQUESTS} <= names  # by the end at the latest
