"""Samples to OTLP: what is built, how it is encoded, and the standard exporters against real servers."""

import http.server
import threading
from concurrent import futures

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import Resource

from stratoscope.instrumentation import semconv as sc
from stratoscope.instrumentation.account import Account
from stratoscope.instrumentation.metrics import (
    Sample,
    account_samples,
    build,
    metric_exporter,
)

OFFSET_NS = 1_700_000_000_000_000_000
RESOURCE = Resource({sc.WALL_OFFSET_NS: OFFSET_NS, sc.HOOK_VERSION: "1.2.3", sc.SERVICE_NAME: "vllm"})
POWER = Sample(sc.M_POWER, "W", "Power.", "gauge", 626.25, {sc.HW_ID: "GPU-0"}, 5_000)
ENERGY = Sample(sc.M_ENERGY, "J", "Energy.", "counter", 12.5, {sc.HW_ID: "GPU-0"}, 5_000)
MEMORY = Sample(sc.M_GPU_MEMORY_USAGE, "By", "Memory.", "updown", 1 << 40, {sc.HW_ID: "GPU-0"}, 0)


def encoded(samples, resource=RESOURCE):
    request = ExportMetricsServiceRequest.FromString(
        encode_metrics(build(resource, samples, start_ns=1_000, now_ns=9_000)).SerializeToString()
    )
    return request.resource_metrics


def test_each_kind_becomes_its_own_kind_of_metric():
    (resource,) = encoded([POWER, ENERGY, MEMORY])
    (scope,) = resource.scope_metrics
    assert (scope.scope.name, scope.scope.version) == ("stratoscope", "1.2.3")
    power, energy, memory = scope.metrics
    assert (power.name, power.unit, power.description) == (sc.M_POWER, "W", "Power.")
    assert power.gauge.data_points[0].as_double == 626.25
    assert energy.sum.is_monotonic and not memory.sum.is_monotonic
    for metric in (energy, memory):
        assert metric.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert memory.sum.data_points[0].as_int == 1 << 40
    assert power.gauge.data_points[0].attributes[0].key == sc.HW_ID


def test_times_are_unix_times_by_the_offset_of_the_resource():
    (resource,) = encoded([POWER, ENERGY, MEMORY])
    power, energy, memory = resource.scope_metrics[0].metrics
    assert power.gauge.data_points[0].time_unix_nano == OFFSET_NS + 5_000
    assert power.gauge.data_points[0].start_time_unix_nano == 0
    assert energy.sum.data_points[0].start_time_unix_nano == OFFSET_NS + 1_000
    assert memory.sum.data_points[0].time_unix_nano == OFFSET_NS + 9_000  # no time of its own


def test_samples_of_one_name_share_a_metric_whatever_their_series_and_time():
    later = POWER._replace(value=600.0, time_ns=6_000)
    other = POWER._replace(attributes={sc.HW_ID: "GPU-1"})
    (resource,) = encoded([POWER, ENERGY, later, other])
    power, energy = resource.scope_metrics[0].metrics
    assert [point.as_double for point in power.gauge.data_points] == [
        626.25,
        600.0,
        626.25,
    ]
    assert len(energy.sum.data_points) == 1


def test_no_samples_no_metrics():
    assert list(encoded([])) == []


@given(
    st.lists(
        st.builds(
            Sample,
            st.sampled_from(["a", "b", "c"]),
            st.just("1"),
            st.just(""),
            st.just("gauge"),
            st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
            st.dictionaries(
                st.text(min_size=1),
                st.text() | st.integers(-(2**63), 2**63 - 1),
                max_size=3,
            ),
            st.integers(1, 2**60),
        ),
        min_size=1,
    )
)
def test_no_value_is_lost_or_moved(samples):
    (resource,) = encoded(samples)
    got = {
        metric.name: [
            (
                point.time_unix_nano - OFFSET_NS,
                getattr(point, point.WhichOneof("value")),
                len(point.attributes),
            )
            for point in metric.gauge.data_points
        ]
        for metric in resource.scope_metrics[0].metrics
    }
    want = {}
    for sample in samples:
        want.setdefault(sample.name, []).append((sample.time_ns, sample.value, len(sample.attributes)))
    assert got == want


def test_the_hooks_own_account():
    account = Account(steps=3, requests=2, critical_ns=30_000, dropped=1, errors=4)
    (resource,) = encoded(account_samples(account, {sc.ROLE: "worker"}, now_ns=7_000))
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert metrics[sc.HOOK_STEPS].sum.data_points[0].as_int == 3
    assert metrics[sc.HOOK_CRITICAL_NS].unit == "ns"
    assert metrics[sc.HOOK_DROPPED].sum.data_points[0].as_int == 1
    assert all(metric.sum.is_monotonic for metric in metrics.values())
    assert set(metrics) == {
        sc.HOOK_STEPS, sc.HOOK_REQUESTS, sc.HOOK_CRITICAL_NS, sc.HOOK_OVERLAPPED_NS, sc.HOOK_REQUEST_NS,
        sc.HOOK_FLUSH_CPU_NS, sc.HOOK_DROPPED, sc.HOOK_ERRORS,
    }  # fmt: skip


@pytest.fixture
def grpc_server():
    received = []

    def export(request, context):
        received.append(ExportMetricsServiceRequest.FromString(request))
        return ExportMetricsServiceResponse().SerializeToString()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.method_handlers_generic_handler(
        "opentelemetry.proto.collector.metrics.v1.MetricsService",
        {"Export": grpc.unary_unary_rpc_method_handler(export)},
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", received
    server.stop(None)


@pytest.fixture
def http_server():
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, ExportMetricsServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def otel(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    return monkeypatch.setenv


def export(protocol):
    exporter = metric_exporter(protocol)
    result = exporter.export(build(RESOURCE, [POWER, ENERGY], 1_000, 9_000))
    exporter.shutdown()
    return result


def test_export_over_grpc(otel, grpc_server):
    endpoint, received = grpc_server
    otel("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    assert export("grpc") is MetricExportResult.SUCCESS
    assert received[0].resource_metrics[0].scope_metrics[0].metrics[0].name == sc.M_POWER


def test_export_over_http_where_metrics_have_a_protocol_of_their_own(otel, http_server):
    endpoint, received = http_server
    otel("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    otel("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf")
    assert export("grpc") is MetricExportResult.SUCCESS
    path, request = received[0]
    assert path == "/v1/metrics"
    assert len(request.resource_metrics[0].scope_metrics[0].metrics) == 2


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"},
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_METRICS_EXPORTER": "none",
        },
    ],
)
def test_no_endpoint_for_metrics_no_exporter(environ):
    assert metric_exporter("grpc", environ) is None
