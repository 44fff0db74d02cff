"""The hook must never be the reason that a request fails: no agent, a killed agent, a second tracer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_run import agent, drive, read_spans, server

from stratoscope.cli import http
from stratoscope.cli.source import AgentSource
from stratoscope.demo import tiny_model
from stratoscope.demo.ports import free_ports
from stratoscope.demo.process import ManagedProcess
from stratoscope.demo.scenario import SCENARIOS
from stratoscope.demo.server import ServerOptions
from stratoscope.instrumentation import semconv as sc

MIX = SCENARIOS["mixed"].mix
NOBODY = "takes no telemetry"
BACK = "answers again"


def eventually(check: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.2)


def start_agent(
    directory: Path, grpc_port: int, api_port: int, log: str
) -> tuple[ManagedProcess, AgentSource]:
    command = [sys.executable, "-m", "stratoscope.cli.main", "agent"]
    (http_port,) = free_ports(1)
    for key, port in (
        ("receivers.otlp.protocols.grpc.endpoint", grpc_port),
        ("receivers.otlp.protocols.http.endpoint", http_port),
        ("extensions.api.endpoint", api_port),
    ):
        command += ["--set", f"{key}=127.0.0.1:{port}"]
    process = ManagedProcess("the agent", command, dict(os.environ), directory / log)
    process.wait_ready(f"http://127.0.0.1:{api_port}/healthz", 60.0)
    return process, AgentSource(f"http://127.0.0.1:{api_port}")


def test_vllm_serves_on_whatever_becomes_of_the_agent(tmp_path: Path) -> None:
    grpc_port, api_port = free_ports(2)
    log = tmp_path / "vllm.log"
    with server(tmp_path, ServerOptions(), f"http://127.0.0.1:{grpc_port}") as vllm:
        results = drive(vllm.base_url, MIX, 24, 12)  # nobody listens
        assert not [r.error for r in results if r.outcome == "error"]
        eventually(lambda: log.read_text().count(NOBODY) >= 3, "each of three processes says so")
        drive(vllm.base_url, MIX, 8, 8, seed=2)
        assert log.read_text().count(NOBODY) == 3, "said once by each process, not with every loss"

        first, source = start_agent(tmp_path, grpc_port, api_port, "first.log")
        eventually(lambda: log.read_text().count(BACK) >= 1, "the hook finds the new agent")
        late = drive(vllm.base_url, MIX, 16, 8, seed=3)
        wanted = {r.trace_id for r in late if r.outcome == "ok"}
        eventually(lambda: wanted <= {row["trace_id"] for row in source.requests(1000)}, "requests are seen")
        dropped = source.summary()["hook"]["dropped"]
        assert dropped > 0, "what was lost while nobody listened is counted"

        os.kill(first.pid, signal.SIGKILL)
        survived = drive(vllm.base_url, MIX, 24, 12, seed=4)
        assert not [r.error for r in survived if r.outcome == "error"]
        assert vllm.returncode() is None
        first.stop()
    assert "stratoscope: fault" not in log.read_text()


def test_an_agent_that_accepts_but_never_answers_stops_nothing(tmp_path: Path) -> None:
    import socket

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(64)  # connections are made, and nothing is ever read
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with server(tmp_path, ServerOptions(), endpoint) as vllm:
            results = drive(vllm.base_url, MIX, 40, 20)
            assert not [r.error for r in results if r.outcome == "error"]
            assert vllm.returncode() is None


def test_vllms_own_tracing_joins_the_same_trace(tmp_path: Path) -> None:
    with agent(tmp_path) as (process, grpc_port, source, otlp_file):
        endpoint = f"http://127.0.0.1:{grpc_port}"
        own = ("--otlp-traces-endpoint", endpoint)
        options = ServerOptions(extra_args=own, env={"OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true"})
        with server(tmp_path, options, endpoint) as vllm:
            results = drive(vllm.base_url, MIX, 24, 12)
            assert not [r.error for r in results if r.outcome == "error"]
            wanted = {r.trace_id for r in results if r.outcome == "ok"}
            eventually(
                lambda: wanted <= {row["trace_id"] for row in source.requests(1000)}, "requests are seen"
            )
            time.sleep(6)  # vLLM's own batch span processor sends every 5 s
        assert source.summary()["conservation"]["max_abs_residual_ns"] == 0
        process.stop()
    spans = read_spans(otlp_file)
    servers = {s["traceId"]: s["spanId"] for s in spans if s["attributes"].get(sc.RECORD) == sc.Record.SERVER}
    theirs = [s for s in spans if sc.RECORD not in s["attributes"] and s["name"] == "llm_request"]
    assert {s["traceId"] for s in theirs} >= wanted
    assert all(s["parentSpanId"] == servers[s["traceId"]] for s in theirs if s["traceId"] in wanted)


OFFLINE = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=512, max_num_seqs=4)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    out = llm.generate(["request token batch"] * 12, params, use_tqdm=False)
    assert len(out) == 12
    print("served", flush=True)
    import time
    time.sleep(3)
"""


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_the_offline_llm_is_recorded_too(tmp_path: Path, multiprocessing: str) -> None:
    model = tiny_model.ensure(tmp_path / "model", lambda text: None)
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    with agent(tmp_path) as (_, grpc_port, source, _file):
        options = ServerOptions(
            env={
                "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
                "STRATOSCOPE_DEMO_PARENT_PID": "",
            }
        )
        environment = options.environment(f"http://127.0.0.1:{grpc_port}")
        done = subprocess.run(
            [sys.executable, str(script), str(model)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert "served" in done.stdout, done.stderr[-3000:]
        eventually(lambda: len(source.requests(1000)) >= 12, "twelve requests are seen")
        summary = source.summary()
        rows = source.requests(1000)
        document = http.get_json(source.url, f"/api/v1/requests/{rows[0]['trace_id']}")
    assert summary["conservation"]["max_abs_residual_ns"] == 0
    assert summary["conservation"]["unattributed_share_mean"] <= 0.01
    assert document["attributes"]["api"] == "llm"
    assert {row["output_tokens"] for row in rows} == {12}
