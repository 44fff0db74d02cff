"""Whole agents: two in a row, and what happens when parts fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratoscope.collector import config
from stratoscope.collector.agent import Agent
from stratoscope.collector.component import Batch, Refused, Signal, StartError
from stratoscope.collector.otlp import SERVICE
from stratoscope.collector.otlp_json import decode_json
from stratoscope.collector.pipeline import FanOut, Guard

StartAgent = Callable[..., Agent]


def send(agent: Agent, kit: Any, signal: Signal, raw: bytes) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{kit.ports(agent)[0]}") as channel:
        channel.unary_unary(f"/{SERVICE[signal]}/Export")(raw, timeout=20)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_bytes_pass_two_agents_untouched(
    kit: Any, start_agent: StartAgent, tmp_path: Path, transport: str
) -> None:
    second = start_agent(kit.tree({"file": {"path": str(tmp_path / "out.bin"), "format": "proto"}}))
    grpc_port, http_port = kit.ports(second)
    exporters = {
        "grpc": {"otlp": {"endpoint": f"127.0.0.1:{grpc_port}", "tls": {"insecure": True}}},
        "http": {"otlphttp": {"endpoint": f"http://127.0.0.1:{http_port}", "compression": "gzip"}},
    }[transport]
    processors = {"memory_limiter": {"limit_mib": 100_000}, "batch": {"timeout": "1h"}}
    first = start_agent(kit.tree(exporters, processors))
    raws = [kit.trace_request(2).SerializeToString() for _ in range(5)]
    for raw in raws:
        send(first, kit, Signal.TRACES, raw)
    first.shutdown()
    second.shutdown()
    data = (tmp_path / "out.bin").read_bytes()
    assert data[4:] == b"".join(raws)  # one batch: its length, then the concatenation
    (name,) = exporters
    assert first.context.telemetry.value("exporter_sent_spans_total", exporter=name) == 10
    assert (
        second.context.telemetry.value("receiver_accepted_spans_total", receiver="otlp", transport=transport)
        == 10
    )


def test_every_pipeline_of_a_signal_gets_every_batch(
    kit: Any, start_agent: StartAgent, tmp_path: Path
) -> None:
    paths = {name: str(tmp_path / name) for name in ("a", "b", "c")}
    tree = kit.tree({f"file/{name}": {"path": path} for name, path in paths.items()})
    one, two = ["file/a", "file/b"], ["file/c"]
    tree["service"]["pipelines"] = {
        "traces/1": {"receivers": ["otlp"], "exporters": one},
        "traces/2": {"receivers": ["otlp"], "exporters": two},
    }
    agent = start_agent(tree)
    request = kit.trace_request()
    send(agent, kit, Signal.TRACES, request.SerializeToString())
    agent.shutdown()
    for path in paths.values():
        assert decode_json(Signal.TRACES, Path(path).read_bytes()).batch.message == request
    with pytest.raises(KeyError):
        agent.component("receivers.none")


def test_a_signal_without_a_pipeline_is_unimplemented(kit: Any, start_agent: StartAgent) -> None:
    tree = kit.tree({"nop": {}})
    tree["service"]["pipelines"].pop("logs")
    agent = start_agent(tree)
    with pytest.raises(grpc.RpcError) as caught:
        send(agent, kit, Signal.LOGS, b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_failed_start_leaves_nothing_running(kit: Any, start_agent: StartAgent, tmp_path: Path) -> None:
    first = start_agent(kit.tree({"nop": {}}))
    tree = kit.tree({"file": {"path": str(tmp_path / "out.json")}})
    taken = f"127.0.0.1:{kit.ports(first)[1]}"
    tree["receivers"]["otlp"]["protocols"] = {
        "grpc": {"endpoint": "127.0.0.1:0"},
        "http": {"endpoint": taken},
    }
    agent = Agent(config.check(tree))
    with pytest.raises(StartError, match=r"receivers\.otlp\.protocols\.http\.endpoint"):
        agent.start()
    with pytest.raises(grpc.RpcError):
        send(agent, kit, Signal.TRACES, b"")
    with pytest.raises(Refused, match="closed"):
        agent.component("exporters.file").consume(kit.batch())


def test_a_component_that_fails_to_stop_does_not_keep_the_others_from_it(
    kit: Any, start_agent: StartAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start_agent(kit.tree({"file": {"path": str(tmp_path / "out.json")}}, {"batch": {}}))

    def explode(timeout_s: float) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(agent.component("receivers.otlp").servers[0], "shutdown", explode)
    agent.shutdown()
    assert agent.context.telemetry.value("component_errors_total", component="receivers.otlp") == 1
    with pytest.raises(Refused, match="closed"):
        agent.component("exporters.file").consume(kit.batch())


class Failing:
    """A consumer that fails as told."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def consume(self, batch: Batch) -> None:
        raise self.error


def test_a_guard_turns_a_bug_into_a_final_refusal_and_counts_it(kit: Any, start_agent: StartAgent) -> None:
    context = start_agent(kit.tree({"nop": {}})).context
    with pytest.raises(Refused, match="internal error in x") as caught:
        Guard("x", Failing(ZeroDivisionError()), context).consume(kit.batch())
    assert not caught.value.retryable
    assert context.telemetry.value("component_errors_total", component="x") == 1


@pytest.mark.parametrize(
    ("retryable", "expected"), [([True, True], True), ([True, False], False), ([False, False], False)]
)
def test_a_fan_out_asks_for_a_retry_only_if_all_can_be_retried(
    kit: Any, retryable: list[bool], expected: bool
) -> None:
    with pytest.raises(Refused) as caught:
        FanOut([Failing(Refused("no", retryable=r)) for r in retryable]).consume(kit.batch())
    assert caught.value.retryable is expected


def test_a_fan_out_is_content_when_one_took_it(kit: Any) -> None:
    sink = kit.Collected()
    FanOut([Failing(Refused("no", retryable=True)), sink]).consume(kit.batch())
    assert len(sink.batches) == 1
