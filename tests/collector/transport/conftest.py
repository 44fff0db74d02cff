"""Real agents on free ports, and what to send them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.collector import config
from stratoscope.collector.agent import Agent
from stratoscope.collector.component import Batch, Consumer, Context, Signal
from stratoscope.collector.config_schema import read
from stratoscope.collector.otlp import decode_protobuf
from stratoscope.collector.receivers import otlp
from stratoscope.collector.telemetry import Telemetry

SIGNALS = [signal.value for signal in Signal]


class Collected:
    """A consumer that keeps what it gets, or refuses it when told to."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.refusal: Exception | None = None
        self._lock = threading.Lock()

    def consume(self, batch: Batch) -> None:
        if self.refusal is not None:
            raise self.refusal
        with self._lock:
            self.batches.append(batch)


def tree(exporters: dict[str, Any], processors: dict[str, Any] | None = None) -> dict[str, Any]:
    """A configuration with an OTLP receiver on free ports and one pipeline a signal."""
    processors = processors or {}
    pipeline = {"receivers": ["otlp"], "processors": list(processors), "exporters": list(exporters)}
    endpoint = {"endpoint": "127.0.0.1:0"}
    return {
        "receivers": {"otlp": {"protocols": {"grpc": endpoint, "http": endpoint}}},
        "processors": processors,
        "exporters": exporters,
        "service": {"pipelines": dict.fromkeys(SIGNALS, pipeline)},
    }


@pytest.fixture
def start_agent() -> Iterator[Callable[..., Agent]]:
    """Starts agents from configuration trees; shuts them all down at the end."""
    agents: list[Agent] = []

    def start(configuration: dict[str, Any]) -> Agent:
        agent = Agent(config.check(configuration))
        agent.start()
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        agent.shutdown(5.0)


def ports(agent: Agent) -> tuple[int, int]:
    """(gRPC, HTTP) ports of an agent's receiver."""
    grpc_server, http_server = agent.component("receivers.otlp").servers
    return grpc_server.port, http_server.port


def wait_for(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Poll until ``condition`` holds; the limit only ends a test that has failed already."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.01)


@contextmanager
def receiver(consumer: Consumer, protocols: dict[str, Any] | None = None) -> Iterator[SimpleNamespace]:
    """A started OTLP receiver in front of ``consumer``: its grpc and http ports, and its telemetry."""
    telemetry = Telemetry()
    problems: list[str] = []
    endpoint = {"endpoint": "127.0.0.1:0"}
    configuration = read(
        otlp.Config, {"protocols": protocols or {"grpc": endpoint, "http": endpoint}}, "", problems
    )
    assert not problems
    part = otlp.build(
        "otlp", configuration, dict.fromkeys(Signal, consumer), Context(telemetry, telemetry.registry)
    )
    part.start()
    try:
        yield SimpleNamespace(ports=[server.port for server in part.servers], telemetry=telemetry, part=part)
    finally:
        part.shutdown(5.0)


def batch(signal: Signal = Signal.TRACES, n: int = 3) -> Batch:
    """A valid batch of ``n`` items."""
    return decode_protobuf(signal, REQUESTS[signal](n).SerializeToString()).batch


def trace_request(n: int = 3, name: str = "span") -> Any:
    """A valid request with ``n`` spans in one scope."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "test"
    scope = resource.scope_spans.add()
    scope.scope.name = "scope"
    for index in range(n):
        scope.spans.add(
            trace_id=os.urandom(16),
            span_id=os.urandom(8),
            name=f"{name}-{index}",
            start_time_unix_nano=10**18,
            end_time_unix_nano=10**18 + 1,
        )
    return request


def metric_request(points: int = 2) -> Any:
    """A valid request with one gauge."""
    request = ExportMetricsServiceRequest()
    gauge = request.resource_metrics.add().scope_metrics.add().metrics.add(name="gauge").gauge
    for index in range(points):
        gauge.data_points.add(as_int=index, time_unix_nano=10**18)
    return request


def log_request(records: int = 1) -> Any:
    """A valid request with log records."""
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    for index in range(records):
        scope.log_records.add(severity_number=9).body.string_value = f"line {index}"
    return request


REQUESTS = {Signal.TRACES: trace_request, Signal.METRICS: metric_request, Signal.LOGS: log_request}


@pytest.fixture
def kit() -> SimpleNamespace:
    """The helpers of this module: test modules cannot import a conftest."""
    return SimpleNamespace(
        Collected=Collected,
        tree=tree,
        ports=ports,
        wait_for=wait_for,
        trace_request=trace_request,
        requests=REQUESTS,
        receiver=receiver,
        batch=batch,
    )
