"""A real agent over HTTP: every route as its OpenAPI description says, and errors that name the cause."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.collector import config
from stratoscope.collector.agent import Agent
from stratoscope.collector.openapi import document

REQUESTS = 5


def started(tree):
    for protocol in tree["receivers"]["otlp"]["protocols"].values():
        protocol["endpoint"] = "127.0.0.1:0"
    tree["extensions"]["api"]["endpoint"] = "127.0.0.1:0"
    agent = Agent(config.check(tree))
    agent.start()
    return agent


def get(agent, path, accept="application/json"):
    port = agent.component("extensions.api").port
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def get_json(agent, path):
    status, body, _ = get(agent, path)
    return status, json.loads(body)


@pytest.fixture(scope="module")
def agent():
    running = started(config.default_tree())
    yield running
    running.shutdown(5.0)


@pytest.fixture
def served(agent, vllm):
    """The agent, after a small vLLM's spans went through its OTLP receiver. Repeats change nothing."""
    port = agent.component("receivers.otlp").servers[1].port
    merged = ExportTraceServiceRequest()
    for message in vllm(REQUESTS).messages():
        merged.MergeFrom(message)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/traces",
        merged.SerializeToString(),
        {"Content-Type": "application/x-protobuf"},
    )
    urllib.request.urlopen(request, timeout=30).close()
    deadline_s = time.monotonic() + 30
    while get_json(agent, "/api/v1/summary")[1]["requests"] < REQUESTS:
        assert time.monotonic() < deadline_s, "the requests never reached the matrix"
        time.sleep(0.05)
    return agent


@pytest.mark.parametrize("path", sorted(document()["paths"]))
def test_every_described_route_answers_as_described(served, path):
    jsonschema = pytest.importorskip("jsonschema")
    trace_id = get_json(served, "/api/v1/requests?limit=1")[1]["requests"][0]["trace_id"]
    status, body, headers = get(served, path.replace("{trace_id}", trace_id))
    assert status == 200
    assert "access-control-allow-origin" not in headers
    described = document()["paths"][path]["get"]["responses"]["200"]["content"]
    if "application/json" in described:
        schema = {**described["application/json"]["schema"], "components": document()["components"]}
        jsonschema.Draft202012Validator(schema).validate(json.loads(body))


def test_every_route_is_described(agent):
    routes = {route.path for route in agent.component("extensions.api")._app().routes}
    assert routes == set(document()["paths"])


def test_the_requests_are_there_and_add_up(served):
    _, summary = get_json(served, "/api/v1/summary")
    assert summary["requests"] == REQUESTS
    assert summary["outcomes"]["ok"] == REQUESTS
    assert summary["conservation"] == {
        "max_abs_residual_ns": 0,
        "unattributed_share_mean": 0.0,
        "unattributed_share_p99": 0.0,
    }
    _, page = get_json(served, "/api/v1/requests?sort=recent&limit=2&offset=1")
    assert page["total"] == REQUESTS and len(page["requests"]) == 2
    _, one = get_json(served, f"/api/v1/requests/{page['requests'][0]['trace_id'].upper()}")
    whole_ms = sum(row["duration_ms"] for row in one["waterfall"])
    assert whole_ms == pytest.approx(page["requests"][0]["e2e_ms"])
    _, none = get_json(served, "/api/v1/requests?outcome=aborted")
    assert none["total"] == 0
    _, steps = get_json(served, "/api/v1/steps?from=1&to=2")
    assert all(1 <= row["step"] <= 2 for row in steps["steps"])


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/api/v1/summary?windw=1", "windw"),
        ("/api/v1/summary?window=nan", "window"),
        ("/api/v1/summary?window=-1", "window"),
        ("/api/v1/matrix?phase=all", "phase"),
        ("/api/v1/requests?limit=0", "limit"),
        ("/api/v1/requests?limit=1e3", "limit"),
        ("/api/v1/requests?sort=random", "sort"),
        ("/api/v1/requests/abc", "trace_id"),
        ("/api/v1/steps?from=x", "from"),
        ("/api/v1/status?x=1", "x"),
    ],
)
def test_a_bad_parameter_is_named(agent, path, parameter):
    status, body = get_json(agent, path)
    assert (status, body["parameter"]) == (400, parameter)
    assert body["error"].startswith(f"{parameter}: ")


def test_what_is_not_there_is_404_in_json(agent):
    status, body = get_json(agent, f"/api/v1/requests/{'0' * 32}")
    assert status == 404 and "0" * 32 in body["error"]
    status, body = get_json(agent, "/nope")
    assert status == 404 and "/nope" in body["error"]


def test_metrics_have_exemplars_in_open_metrics_only(served):
    _, plain, _ = get(served, "/metrics", "text/plain")
    assert f'stratoscope_requests_total{{model_name="tiny",outcome="ok"}} {float(REQUESTS)}' in plain
    assert "trace_id" not in plain
    _, text, headers = get(served, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert '# {trace_id="ab' in text and text.endswith("# EOF\n")


def test_without_attribution_or_prometheus_it_says_so():
    tree = config.default_tree()
    pipeline = tree["service"]["pipelines"]["traces"]
    pipeline.update(processors=["batch"], exporters=["nop"])
    bare = started(tree)
    try:
        status, body = get_json(bare, "/api/v1/summary")
        assert status == 503 and "attribution" in body["error"]
        assert get_json(bare, "/metrics")[0] == 404
        assert get_json(bare, "/healthz") == (200, {"status": "ok"})
        assert get_json(bare, "/api/v1/status")[1]["attribution"] is None
    finally:
        bare.shutdown(5.0)


def test_two_api_extensions_share_their_metrics():
    tree = config.default_tree()
    tree["extensions"]["api/two"] = {"endpoint": "127.0.0.1:0"}
    tree["service"]["extensions"] = ["api", "api/two"]
    running = started(tree)
    try:
        for name in ("extensions.api", "extensions.api/two"):
            port = running.component(name).port
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                assert b"stratoscope_agent_" in answer.read()
    finally:
        running.shutdown(5.0)


def test_answers_are_not_to_be_kept(agent):
    for path in ("/api/v1/summary", "/healthz"):
        assert get(agent, path)[2]["Cache-Control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_methods_are_refused_in_json(agent, method):
    port = agent.component("extensions.api").port
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1/summary", method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 405
    assert "error" in json.loads(caught.value.read())
