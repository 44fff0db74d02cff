"""One run of the real thing: agent, vLLM with the hook, load; and everything that came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratoscope.cli.source import AgentSource
from stratoscope.demo import load, tiny_model
from stratoscope.demo.load import ClientRequest
from stratoscope.demo.ports import free_ports
from stratoscope.demo.process import ManagedProcess
from stratoscope.demo.server import MODEL_NAME, READY_TIMEOUT_S, ServerOptions, VllmServer
from stratoscope.demo.workload import Mix, ask

VISIBLE_S = 30.0


@dataclass
class Run:
    """What a run left behind. ``spans`` are the hook's own spans as the agent's file exporter wrote them."""

    results: list[ClientRequest]
    summary: dict[str, Any]
    rows: dict[str, dict[str, Any]]  # by trace id
    documents: dict[str, dict[str, Any]]  # the slowest, by trace id
    otlp_file: Path
    vllm_log: str
    status: dict[str, Any]
    visible_s: float
    spans: list[dict[str, Any]] = field(default_factory=list)

    def answered(self) -> list[ClientRequest]:
        """Requests that the server began to answer."""
        return [result for result in self.results if result.status]


@contextlib.contextmanager
def agent(directory: Path) -> Iterator[tuple[ManagedProcess, int, AgentSource, Path]]:
    """A real agent process that also writes what passes through it to a file."""
    grpc_port, http_port, api_port = free_ports(3)
    otlp_file = directory / "traces.jsonl"
    config = {
        "receivers": {"otlp": {"protocols": {
            "grpc": {"endpoint": f"127.0.0.1:{grpc_port}"}, "http": {"endpoint": f"127.0.0.1:{http_port}"},
        }}},
        "processors": {"attribution": {"spans": {"export": "all"}}},
        "exporters": {"file": {"path": str(otlp_file)}, "prometheus": {}},
        "extensions": {"api": {"endpoint": f"127.0.0.1:{api_port}"}},
        "service": {"extensions": ["api"], "pipelines": {"traces": {
            "receivers": ["otlp"], "processors": ["attribution"], "exporters": ["file", "prometheus"],
        }}},
    }  # fmt: skip
    path = directory / "agent.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "stratoscope.cli.main", "agent", "-c", str(path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    process = ManagedProcess("the agent", command, environment, directory / "agent.log")
    try:
        process.wait_ready(f"http://127.0.0.1:{api_port}/healthz", 60.0)
        yield process, grpc_port, AgentSource(f"http://127.0.0.1:{api_port}"), otlp_file
    finally:
        process.stop()


@contextlib.contextmanager
def server(directory: Path, options: ServerOptions, otlp_endpoint: str | None) -> Iterator[VllmServer]:
    """A real vLLM, ready to serve."""
    model = tiny_model.ensure(directory / "model", lambda text: None)
    (port,) = free_ports(1)
    started = VllmServer(model, port, options, otlp_endpoint, directory / "vllm.log")
    try:
        started.wait_ready(started.health_url, READY_TIMEOUT_S, lambda _: None)
        yield started
    finally:
        started.stop()


def drive(base_url: str, mix: Mix, requests: int, concurrency: int, seed: int = 1) -> list[ClientRequest]:
    """Send the load and return what the clients saw."""
    return asyncio.run(
        load.drive(base_url, lambda index: ask(mix, MODEL_NAME, seed, index), concurrency, requests=requests)
    )


def run(directory: Path, options: ServerOptions, mix: Mix, requests: int, concurrency: int) -> Run:
    """The whole of it. The agent is stopped before its file is read, so that the file is whole."""
    from stratoscope.cli import http

    with agent(directory) as (_, grpc_port, source, otlp_file):
        with server(directory, options, f"http://127.0.0.1:{grpc_port}") as vllm:
            results = drive(vllm.base_url, mix, requests, concurrency)
            rows, visible_s = _wait_visible(source, results)
            summary = source.summary()
            documents = {row["trace_id"]: source.request(row["trace_id"]) for row in summary["slowest"]}
            status = http.get_json(source.url, "/api/v1/status")
        log = (directory / "vllm.log").read_text(errors="replace")
    made = Run(results, summary, rows, documents, otlp_file, log, status, visible_s)
    made.spans = read_spans(otlp_file)
    return made


def _wait_visible(
    source: AgentSource, results: list[ClientRequest]
) -> tuple[dict[str, dict[str, Any]], float]:
    wanted = {result.trace_id for result in results if result.status}
    started = time.monotonic()
    while True:
        rows = {row["trace_id"]: row for row in source.requests(10 * len(results))}
        waited_s = time.monotonic() - started
        if wanted <= rows.keys() or waited_s > VISIBLE_S:
            return rows, waited_s
        time.sleep(0.25)


def read_spans(path: Path) -> list[dict[str, Any]]:
    """All spans of an OTLP JSON lines file: name, ids, and attributes as plain values."""
    found = []
    for line in path.read_text().splitlines():
        for resource in json.loads(line).get("resourceSpans", ()):
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    attributes = {
                        a["key"]: next(iter(a["value"].values()), None) for a in span.get("attributes", ())
                    }
                    found.append({**span, "attributes": attributes})
    return found
