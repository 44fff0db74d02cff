"""Real vLLM under real load: everything adds up, under the client's own trace ids.

Four servers, one after the other: as it comes; two API servers and too few KV blocks; tensor
parallel over two ranks; asynchronous scheduling. Each serves streaming and plain requests, n = 4,
costly sampling and clients that leave.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from vllm_run import Run, run

from stratoscope.demo.scenario import SCENARIOS
from stratoscope.demo.server import ServerOptions
from stratoscope.instrumentation import semconv as sc

MIXED, STARVED = SCENARIOS["mixed"], SCENARIOS["kv-starved"]
SERVERS = {
    "plain": (ServerOptions(max_num_seqs=32), MIXED.mix),
    "starved-two-api-servers": (
        ServerOptions(
            max_num_seqs=32, kv_blocks=28, prefix_caching=False, max_model_len=1536, api_server_count=2
        ),
        STARVED.mix,
    ),
    "tensor-parallel": (ServerOptions(max_num_seqs=32, tensor_parallel_size=2), MIXED.mix),
    "async-scheduling": (ServerOptions(max_num_seqs=32, async_scheduling=True), MIXED.mix),
}
REQUESTS, CONCURRENCY = 200, 64


@pytest.fixture(scope="module", params=list(SERVERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    options, mix = SERVERS[request.param]
    return request.param, run(tmp_path_factory.mktemp(request.param), options, mix, REQUESTS, CONCURRENCY)


def test_the_load_was_served(served: tuple[str, Run]) -> None:
    _, made = served
    failed = [result for result in made.results if result.outcome == "error"]
    assert not failed, failed[0].error
    assert len(made.results) == REQUESTS
    kinds = {result.kind for result in made.results}
    assert {"chat", "choices", "completion", "abort"} <= kinds
    assert any(result.outcome == "aborted" for result in made.results)


def test_every_nanosecond_is_somewhere(served: tuple[str, Run]) -> None:
    _, made = served
    assert made.summary["conservation"]["max_abs_residual_ns"] == 0
    for row in made.summary["matrix"]:
        assert row["seconds"] > 0
    for document in made.documents.values():
        for phase in document["phases"].values():
            assert sum(cause["seconds"] for cause in phase["causes"]) == pytest.approx(
                phase["seconds"], abs=1e-6
            )


def test_hardly_anything_is_unattributed(served: tuple[str, Run]) -> None:
    _, made = served
    assert made.summary["conservation"]["unattributed_share_mean"] <= 0.01
    assert made.summary["conservation"]["unattributed_share_p99"] <= 0.03


def test_every_request_is_accounted_for_under_its_own_trace_id(served: tuple[str, Run]) -> None:
    _, made = served
    assert {result.trace_id for result in made.answered()} <= made.rows.keys()
    for result in made.answered():
        expected = {"ok": {"ok"}, "aborted": {"aborted", "ok"}}[
            result.outcome
        ]  # a late abort may be too late
        assert made.rows[result.trace_id]["outcome"] in expected
    assert made.summary["outcomes"]["unfinished"] == 0
    assert made.summary["outcomes"]["aborted"] > 0


def test_all_processes_speak_under_the_clients_trace_id(served: tuple[str, Run]) -> None:
    name, made = served
    roles: dict[str, set[str]] = defaultdict(set)
    for span in made.spans:
        record = span["attributes"].get(sc.RECORD, "")
        if record.startswith("request."):
            roles[span["traceId"]].add(record)
            if record == sc.Record.WORKER:
                roles[span["traceId"]].add(f"rank {span['attributes'][sc.RANK]}")
    wanted = {sc.Record.SERVER, sc.Record.ENGINE, sc.Record.WORKER, "rank 0"}
    if name == "tensor-parallel":
        wanted.add("rank 1")
    missing = {r.trace_id: wanted - roles[r.trace_id] for r in made.results if r.outcome == "ok"}
    assert not {trace_id: absent for trace_id, absent in missing.items() if absent}


def test_the_servers_latency_is_about_the_clients(served: tuple[str, Run]) -> None:
    """The server's last send may return after its client has the bytes, so not quite within."""
    _, made = served
    for result in made.results:
        if result.outcome == "ok":
            assert 0 < made.rows[result.trace_id]["e2e_ms"] * 1e6 <= result.e2e_ns + 1e9


def test_what_is_special_about_this_server_shows(served: tuple[str, Run]) -> None:
    name, made = served
    seconds: dict[str, float] = defaultdict(float)
    for row in made.summary["matrix"]:
        if row["phase"] == "e2e":
            seconds[f"{row['layer']}.{row['cause']}"] += row["seconds"]
    assert seconds["model.decode"] > 0 and seconds["model.prefill"] > 0
    assert seconds["framework.tokenize"] > 0 and seconds["framework.template"] > 0
    if name == "starved-two-api-servers":
        assert seconds["framework.wait_kv_blocks"] > 0
        assert seconds["model.preempted"] > 0 and seconds["model.recompute"] > 0
        servers = {p["process_uid"] for p in made.summary["hook"]["processes"] if p["role"] == "api_server"}
        assert len(servers) == 2
    else:
        assert seconds["framework.wait_slots"] > 0
    ranks = made.summary["engines"][0]["ranks"]
    assert ranks == ([0, 1] if name == "tensor-parallel" else [0])


def test_the_hook_lost_nothing_and_failed_nowhere(served: tuple[str, Run]) -> None:
    _, made = served
    hook = made.summary["hook"]
    assert (hook["dropped"], hook["errors"]) == (0, 0)
    assert not [p["missing"] for p in hook["processes"] if p["missing"]]
    assert "stratoscope: fault" not in made.vllm_log


def test_prompts_are_not_recorded(served: tuple[str, Run]) -> None:
    _, made = served
    assert made.spans
    assert not [s for s in made.spans if sc.GEN_AI_INPUT_MESSAGES in s["attributes"]]
    assert '"gen_ai.input.messages"' not in made.otlp_file.read_text()


def test_child_spans_lie_under_the_servers_span(served: tuple[str, Run]) -> None:
    _, made = served
    servers = {
        (s["traceId"], s["spanId"]) for s in made.spans if s["attributes"].get(sc.RECORD) == sc.Record.SERVER
    }
    children = [s for s in made.spans if s["attributes"].get(sc.SYNTH) and s["name"] != "engine step"]
    assert {"prefill", "decode", "admission"} <= {span["name"] for span in children}
    assert all((span["traceId"], span["parentSpanId"]) in servers for span in children)


def test_the_files_say_what_the_agent_said(served: tuple[str, Run], tmp_path: Path) -> None:
    """Offline analysis of what passed through the agent gives the agent's own numbers."""
    _, made = served
    command = [sys.executable, "-m", "stratoscope.cli.main", "analyze", str(made.otlp_file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    offline = json.loads(done.stdout)
    assert offline["requests"] >= made.summary["requests"]
    assert offline["conservation"]["max_abs_residual_ns"] == 0
    assert offline["conservation"]["unattributed_share_mean"] <= 0.01
