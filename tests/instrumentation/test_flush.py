"""The flush thread against a real OTLP server: what arrives, what is said when nobody listens."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.instrumentation import semconv as sc
from stratoscope.instrumentation.hook import Hook
from stratoscope.instrumentation.server_request import ServerRecord
from stratoscope.instrumentation.settings import Settings


class Server(grpc.GenericRpcHandler):
    """An OTLP server that keeps the spans it gets."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[dict[str, Any]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        def take(raw: bytes, context: Any) -> bytes:
            if details.method.endswith("TraceService/Export"):
                for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
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


EXIT = """
import time
from stratoscope.instrumentation import hook, semconv as sc, settings
from stratoscope.instrumentation.server_request import ServerRecord
made = hook.get(settings.read())
record = ServerRecord("http", time.monotonic_ns(), None)
record.close(time.monotonic_ns(), None)
made.finish(sc.Record.SERVER, record)
made.start()
"""


def test_a_process_ends_though_nobody_listens() -> None:
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", EXIT], env=env, timeout=60, check=False)
    assert done.returncode == 0


def test_a_forked_child_starts_empty() -> None:
    code = EXIT + (
        "import os, sys\n"
        "uid = made.process_uid\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    fresh = made.process_uid != uid and not made.finished and made._flush is None\n"
        "    os._exit(0 if fresh else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60, check=False).returncode == 0
